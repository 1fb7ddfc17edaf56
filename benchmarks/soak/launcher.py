"""Runs `snapcap` with an engine process in which SIGUSR2 runs a kernel that asserts.

Only the campaign of faults starts servers this way.

    python -m snapcap.benchmarks.soak.launcher serve …

The shipped server has no such way in: the handler is put around `processes._serve_engine` here. A device
assertion is sticky: whatever the process asks of its context from then on fails, on every stream and thread.
"""

import signal
import socket
from types import FrameType

from snapcap.service.cli.main import main
from snapcap.service.config.settings import Settings
from snapcap.service.ipc.shared_pixels import SharedPixels
from snapcap.service.server import processes

_serve_engine = processes._serve_engine


def assert_on_device(_number: int, _frame: FrameType | None) -> None:
    import torch

    torch._assert_async(torch.zeros(1, device="cuda"))


def serve_engine(settings: Settings, end: socket.socket, pixels: SharedPixels, origin: float) -> int:
    signal.signal(signal.SIGUSR2, assert_on_device)
    return _serve_engine(settings, end, pixels, origin)


if __name__ == "__main__":
    processes._serve_engine = serve_engine
    raise SystemExit(main())
