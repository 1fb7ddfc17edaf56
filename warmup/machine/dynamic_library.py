"""Loads native libraries without Python's lock.

The driver, torch's libraries and packages are all opened through it.
"""

import ctypes
import os

# ctypes gives Python's lock up while it calls a function, but not while it loads a library or looks for a function.
# Both wait until no other thread loads one, so these are looked for before anybody does.
_DLOPEN = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)(("dlopen", ctypes.CDLL(None)))
_DLERROR = ctypes.PYFUNCTYPE(ctypes.c_char_p)(("dlerror", ctypes.PyDLL(None)))


def open_library(path: str | os.PathLike[str], flags: int = os.RTLD_NOW) -> int:
    """The handle of a library, which stays mapped until the process ends; threads that run Python go on meanwhile.

    Raises:
        OSError: the library cannot be loaded; says why.
    """
    handle: int | None = _DLOPEN(os.fsencode(path), flags)
    if handle is None:
        raise OSError((_DLERROR() or b"it cannot be loaded").decode(errors="replace"))  # dlerror is per thread
    return handle
