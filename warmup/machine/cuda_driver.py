"""Loads native libraries without Python's lock, and calls the CUDA driver without torch.

The driver, torch's libraries and packages are all opened through ``open_library``. The driver tells the properties
of a device that the key needs, and makes the context, while torch is being imported.
"""

import ctypes
import os

from snapcap.models.dataclass import dataclass

# ctypes gives Python's lock up while it calls a function, but not while it loads a library or looks up a function.
# Loading and looking up wait until no other thread loads a library. So these two functions are looked up at import.
_DLOPEN = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)(("dlopen", ctypes.CDLL(None)))
_DLERROR = ctypes.PYFUNCTYPE(ctypes.c_char_p)(("dlerror", ctypes.PyDLL(None)))


def open_library(path: str | os.PathLike[str], flags: int = os.RTLD_NOW) -> int:
    """Loads a library and returns its handle, while other threads run Python. The library stays mapped until the
    process ends. Raises OSError with the reason if the library cannot be loaded."""
    handle: int | None = _DLOPEN(os.fsencode(path), flags)
    if handle is None:
        raise OSError((_DLERROR() or b"it cannot be loaded").decode(errors="replace"))  # dlerror is per thread
    return handle


_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute
_NAME_BYTES = 256
LIBRARY = "libcuda.so.1"


# Advice for a missing GPU. A container that has lost its GPU should get it back, so --device cpu is named last: a
# start on the CPU would hide that the GPU is gone.
NO_GPU = (
    "see whether nvidia-smi shows the GPU here and whether the container was given one (docker run --gpus all; "
    "nvidia.com/gpu in a pod); a machine without a GPU takes --device cpu"
)


class CudaDriverError(RuntimeError):
    """Says in one line that there is no CUDA driver or no such device, or which call of the driver failed."""


@dataclass(frozen=True)
class CudaDevice:
    """Holds the properties of a GPU for which machine code is compiled."""

    name: str
    compute_capability: str
    multiprocessors: int


def cuda_device(index: int) -> CudaDevice:
    """Describes the device that torch calls ``cuda:index``: the driver obeys CUDA_VISIBLE_DEVICES as torch does.
    Raises CudaDriverError if there is no driver, or no device of this index."""
    driver = _Driver()
    device, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    driver.call("cuDeviceGet", ctypes.byref(device), index)
    driver.call("cuDeviceGetName", name, _NAME_BYTES, device)
    return CudaDevice(
        name=name.value.decode(errors="replace"),
        compute_capability=f"{driver.attribute(device, _MAJOR)}.{driver.attribute(device, _MINOR)}",
        multiprocessors=driver.attribute(device, _MULTIPROCESSORS),
    )


def cuda_device_count() -> int:
    """Returns the number of devices that the driver shows to this process; 0 without a driver."""
    count = ctypes.c_int()
    try:
        _Driver().call("cuDeviceGetCount", ctypes.byref(count))
    except CudaDriverError:
        return 0
    return count.value


def has_cuda_driver() -> bool:
    """Returns whether the driver's library is installed. The call loads the library and does not initialise it."""
    try:
        open_library(LIBRARY)
    except OSError:
        return False
    return True


def open_context(index: int) -> ctypes.c_void_p:
    """Make the context of ``cuda:index`` that torch is going to use. The context stays until the process ends.
    Raises CudaDriverError if there is no driver, no such device, or no memory on it."""
    driver = _Driver()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    driver.call("cuDeviceGet", ctypes.byref(device), index)
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def total_device_memory(index: int) -> int:
    """Returns all bytes of ``cuda:index``, without a context. Raises CudaDriverError as ``cuda_device`` does."""
    driver = _Driver()
    device, total = ctypes.c_int(), ctypes.c_size_t()
    driver.call("cuDeviceGet", ctypes.byref(device), index)
    driver.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
    return total.value


def free_device_memory(index: int) -> int:
    """Makes this process's context on ``cuda:index``, and returns the bytes that are then free on the device.
    Raises CudaDriverError as ``open_context`` does."""
    context, driver = open_context(index), _Driver()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    driver.call("cuCtxSetCurrent", context)
    driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


class _Driver:
    """Calls functions of libcuda. Each object initialises the driver, which costs nothing after the first time."""

    def __init__(self) -> None:
        try:
            # Loading the library without Python's lock, because it takes 0.1 s or more. cuInit takes as long.
            self._library = ctypes.CDLL(LIBRARY, handle=open_library(LIBRARY))
        except OSError as error:
            raise CudaDriverError(f"this machine has no CUDA driver ({LIBRARY})") from error
        self.call("cuInit", 0)

    def call(self, function: str, *args: object) -> None:
        code = getattr(self._library, function)(*args)
        if code != 0:
            raise CudaDriverError(f"the CUDA driver's {function} failed with code {code}")

    def attribute(self, device: ctypes.c_int, attribute: int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        return value.value
