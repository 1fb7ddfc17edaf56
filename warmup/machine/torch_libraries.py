"""Loads torch's native libraries apart from its Python module, and opens a GPU when the start begins.

The driver and CUDA's runtime take 0.4 s, without torch or Python's lock. The engine process imports this module
before all that needs torch, and so it imports little.
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
    """Import what has compiled parts, before ``begin_torch_libraries``.

    The dynamic linker does one thing at a time, and Python waits for it with its lock held where a module has such
    parts. Nobody here asks numpy's BLAS for anything: its threads, one for each CPU, would
    look for work without a pause for a tenth of a second.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name in COMPILED:
        importlib.import_module(name)


def begin_torch_libraries() -> None:
    """Load them on a thread, while others go on importing what has no compiled parts."""
    threading.Thread(target=load_torch_libraries, name="libraries", daemon=True).start()


def load_torch_libraries() -> int | None:
    """Map and initialise torch's native libraries without Python's lock, so that other threads go on importing.

    Loading takes a sixth of the time of importing torch, which holds the lock meanwhile. A second call while the
    first one runs waits for it, also without the lock. Returns the handle of libtorch. Without these libraries, or
    on a system that is not POSIX, returns None: importing torch reports the error.
    """
    let_threads_sleep()
    if os.name != "posix":
        return None
    try:
        folder = _library_folder()
    except MachineError:
        return None
    # The linker loads one library at a time. The driver's first: it is initialised while torch's are loaded.
    with contextlib.suppress(OSError):
        open_library(cuda_driver.LIBRARY)
    try:
        # Same flags as torch's own: symbols of its dependencies are global, its own are local. libtorch_python is
        # left out, as it uses Python.
        open_library(folder / "libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL)
        return open_library(folder / "libtorch.so")
    except OSError:
        return None


def let_threads_sleep() -> None:
    """Set how the threads of an operation wait for each other, before libgomp is loaded."""
    # By default libgomp's threads spin while they wait for each other, and where a CPU is
    # shared with HTTP, decoding or a build, the one that is waited for is the one that does not run: an encode of
    # 20 ms took 800 ms. So they sleep, but after some tens of microseconds, in which most waits of a decode step
    # end: it is 2.7 × as fast (benchmarks/NOTES.md). If the user has set either variable, both stay as they are.
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="1000")


def open_libgomp() -> None:
    """Load libgomp as torch brings it along, for libraries that name it: the system may have none."""
    with contextlib.suppress(MachineError, OSError):
        open_library(_library_folder() / "libgomp.so.1")


def _library_folder() -> Path:
    return package_folder("torch") / "lib"


def begin_device_context(device: str) -> None:
    """Make the context that torch is going to use and open the runtime, on a thread; a second one waits for the
    first in the driver. Where there may be a GPU, torch's libraries are loaded beside it.

    ``device`` is as in the options; for a CPU there is nothing to do. Errors of a driver or device are ignored
    here: the first use of the device reports them.
    """
    threading.Thread(target=_open, args=(device, True), name="device-context", daemon=True).start()


def begin_device_libraries(device: str) -> None:
    """Do what ``begin_device_context`` does before it makes the context: initialise the driver and load torch's
    libraries, on a thread. No memory of the device is taken."""
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
            # The runtime's first call shows the context all kernels that libtorch has.
            ctypes.CDLL(None, handle=library).cudaSetDevice(index)
