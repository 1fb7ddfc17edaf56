"""Native libraries, mapped without Python's lock."""

import ctypes
import os


def open_library(path: str | os.PathLike[str], flags: int = os.RTLD_NOW) -> int:
    """The handle of a library, which stays mapped until the process ends; threads that run Python go on meanwhile.

    ctypes releases the lock while it calls a function, but not while it loads a library: so this calls ``dlopen``.

    Raises:
        OSError: the library cannot be loaded; says why.
    """
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    dlerror = ctypes.PyDLL(None).dlerror  # found before the call: to look for it forgets the error
    dlerror.restype = ctypes.c_char_p
    handle: int | None = dlopen(os.fsencode(path), flags)
    if handle is None:
        raise OSError((dlerror() or b"it cannot be loaded").decode(errors="replace"))
    return handle
