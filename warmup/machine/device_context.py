"""Opens a GPU when the start begins: its driver and CUDA's runtime take 0.4 s, without torch or Python's lock.

The engine process imports it before all that needs torch, and so it imports little.
"""

import contextlib
import ctypes
import threading

from snapcap.warmup.machine.cuda_driver import CudaDriverError, open_context
from snapcap.warmup.machine.installation import MachineError, resolve_device
from snapcap.warmup.machine.torch_libraries import load_torch_libraries


def begin_device_context(device: str) -> None:
    """Make the context that torch is going to use and open the runtime, on a thread; a second one waits for the
    first in the driver.

    ``device`` is as in the options; for a CPU there is nothing to do. What is wrong with a driver or a device is
    for those to report who use it.
    """
    threading.Thread(target=_open, args=(device,), name="device-context", daemon=True).start()


def _open(device: str) -> None:
    with contextlib.suppress(CudaDriverError, MachineError, AttributeError):
        kind, _, index = resolve_device(device).partition(":")
        if kind == "cuda":
            open_context(int(index or 0))
            if (library := load_torch_libraries()) is not None:
                # The runtime's first call shows the context all kernels that libtorch has.
                ctypes.CDLL(None, handle=library).cudaSetDevice(int(index or 0))
