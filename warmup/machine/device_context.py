"""Opens a GPU when the start begins: its driver and CUDA's runtime take 0.4 s, without torch or Python's lock.

The engine process imports it before all that needs torch, and so it imports little.
"""

import contextlib
import ctypes
import threading

from snapcap.warmup.machine import installation
from snapcap.warmup.machine.cuda_driver import CudaDriverError, has_cuda_driver, open_context
from snapcap.warmup.machine.installation import MachineError, resolve_device
from snapcap.warmup.machine.torch_libraries import begin_torch_libraries, load_torch_libraries


def begin_device_context(device: str) -> None:
    """Make the context that torch is going to use and open the runtime, on a thread; a second one waits for the
    first in the driver. Where there may be a GPU, torch's libraries are loaded beside it.

    ``device`` is as in the options; for a CPU there is nothing to do. Errors of a driver or device are ignored
    here: the first use of the device reports them.
    """
    threading.Thread(target=_open, args=(device,), name="device-context", daemon=True).start()


def _open(device: str) -> None:
    with contextlib.suppress(CudaDriverError, MachineError, AttributeError):
        built_for_cuda = device != "auto" or installation.torch_version().cuda is not None
        if device == "cpu" or not built_for_cuda or not has_cuda_driver():
            return
        begin_torch_libraries()
        kind, _, index = resolve_device(device).partition(":")
        if kind == "cuda":
            open_context(int(index or 0))
            if (library := load_torch_libraries()) is not None:
                # The runtime's first call shows the context all kernels that libtorch has.
                ctypes.CDLL(None, handle=library).cudaSetDevice(int(index or 0))
