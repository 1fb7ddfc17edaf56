"""Loads torch's native libraries without its Python module, and opens the GPU early in a start.

The driver and CUDA's runtime take 0.4 s, and need neither torch nor Python's interpreter lock. The engine process
imports this module before all modules that need torch, so it imports little.
"""

import contextlib
import ctypes
import importlib
import os
import threading
from pathlib import Path

from snapcap.warmup.machine import cuda_driver, installation
from snapcap.warmup.machine.cuda_driver import (
    CudaDriverError,
    cuda_device,
    has_cuda_driver,
    open_context,
    open_library,
)
from snapcap.warmup.machine.installation import MachineError, package_folder, resolve_device

# Modules with native code among all that a compiled start imports.
COMPILED = (
    "binascii",
    "fcntl",
    "hashlib",
    "heapq",
    "json",
    "mmap",
    "numpy",
    "queue",
    "random",
    "shutil",
    "subprocess",
    "uuid",
)


def import_compiled() -> None:
    """Import the modules with native code, before ``begin_torch_libraries``.

    The dynamic linker loads one library at a time, and Python waits for it with the interpreter lock held when it
    imports native code. numpy's BLAS gets one thread because nothing here uses it: its threads, one for each CPU,
    would spin for a tenth of a second."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name in COMPILED:
        importlib.import_module(name)


def begin_torch_libraries() -> None:
    """Load torch's libraries on a thread, while other threads import modules without native code."""
    threading.Thread(target=load_torch_libraries, name="libraries", daemon=True).start()


def load_torch_libraries() -> int | None:
    """Map and initialise torch's native libraries without the interpreter lock, so that other threads can import.

    Loading takes a sixth of the time of importing torch, which holds the lock. A second call waits for the first
    one, also without the lock. Returns the handle of libtorch; None without these libraries, or on a system that is
    not POSIX: importing torch then reports the error."""
    # By default libgomp's threads spin while they wait. If HTTP, decoding or a build needs a CPU too, spinning
    # threads keep the awaited thread from running: an encode of 20 ms took 800 ms. Sleep begins only after some
    # tens of microseconds, in which most waits of a decode step end: a step is then 2.7 × as fast
    # (benchmarks/NOTES.md). If the user has set either variable, both stay as they are.
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="1000")
    if os.name != "posix":
        return None
    try:
        folder = _library_folder()
    except MachineError:
        return None
    # The linker loads one library at a time. The driver's library is the first: it initialises while torch's load.
    with contextlib.suppress(OSError):
        open_library(cuda_driver.LIBRARY)
    try:
        # torch uses the same flags: global symbols for its dependencies, local symbols for its own libraries.
        # libtorch_python is left out, because it uses Python.
        open_library(folder / "libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL)
        return open_library(folder / "libtorch.so")
    except OSError:
        return None


def _library_folder() -> Path:
    return package_folder("torch") / "lib"


def begin_device_context(device: str) -> None:
    """Open CUDA's runtime and create the context that torch will use, on a thread; load torch's libraries on
    another. A second call waits in the driver for the first one.

    ``device``: as in the options; for a CPU nothing is done. Errors of the driver or device are ignored here: the
    first use of the device reports them."""
    threading.Thread(target=_open, args=(device, True), name="device-context", daemon=True).start()


def begin_device_libraries(device: str) -> None:
    """Initialise the driver and load torch's libraries on a thread, without a context and without device memory."""
    threading.Thread(target=_open, args=(device, False), name="device-libraries", daemon=True).start()


def _open(device: str, with_context: bool) -> None:
    with contextlib.suppress(CudaDriverError, MachineError, AttributeError):
        built_for_cuda = device != "auto" or installation.torch_version().cuda is not None
        if device == "cpu" or not built_for_cuda or not has_cuda_driver():
            return
        begin_torch_libraries()
        kind, _, number = resolve_device(device).partition(":")
        index = int(number or 0)
        if kind != "cuda":
            return
        if not with_context:
            cuda_device(index)  # initialises the driver
            return
        open_context(index)
        if (library := load_torch_libraries()) is not None:
            # The runtime's first call registers all kernels of libtorch in the context.
            ctypes.CDLL(None, handle=library).cudaSetDevice(index)
