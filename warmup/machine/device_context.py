"""Opens the context of a GPU when the start begins: the driver takes 0.3 s, without torch or Python's lock.

The engine process imports it before all that needs torch, and so it imports little.
"""

import contextlib
import threading

from snapcap.warmup.machine.cuda_driver import CudaDriverError, open_context
from snapcap.warmup.machine.installation import MachineError, resolve_device


def begin_device_context(device: str) -> None:
    """Make the context that torch is going to use, on a thread; a second one waits for the first in the driver.

    ``device`` is as in the options; for a CPU there is nothing to do. What is wrong with a driver or a device is
    for those to report who use it.
    """
    threading.Thread(target=_open, args=(device,), name="device-context", daemon=True).start()


def _open(device: str) -> None:
    with contextlib.suppress(CudaDriverError, MachineError):
        kind, _, index = resolve_device(device).partition(":")
        if kind == "cuda":
            open_context(int(index or 0))
