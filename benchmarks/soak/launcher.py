"""Runs `snapcap` with an engine process in which SIGUSR2 runs a kernel that asserts.

    python -m snapcap.benchmarks.soak.launcher serve …

Only the campaign of faults starts servers this way. The shipped server has no such handler: the launcher adds it
to the engine process's function. A device assertion is sticky: all later calls of the process in its context fail,
on every stream and thread.
"""

import signal
import socket
import sys
from types import FrameType

from snapcap.service.cli.main import main
from snapcap.service.config.settings import Settings
from snapcap.service.ipc.shared_pixels import SharedPixels
from snapcap.service.server.processes import fork_engine, serve_captions
from snapcap.warmup.machine.own_imports import import_only_what_is_installed


def assert_on_device(_number: int, _frame: FrameType | None) -> None:
    import torch

    torch._assert_async(torch.zeros(1, device="cuda"))


def serve(settings: Settings, end: socket.socket, pixels: SharedPixels, origin: float, importing: float) -> int:
    signal.signal(signal.SIGUSR2, assert_on_device)
    return serve_captions(settings, end, pixels, origin, importing)


if __name__ == "__main__":
    import_only_what_is_installed()
    raise SystemExit(main(sys.argv[1:], fork_engine(serve)))
