"""torch's native libraries, loaded apart from the Python module."""

import os
from importlib.util import find_spec
from pathlib import Path


def load_torch_libraries() -> None:
    """Map and initialise torch's native libraries without Python's lock, so that other threads go on importing.

    It is a sixth of importing torch, which does it with the lock held. A second call while the first one runs
    waits for it, also without the lock. Without these libraries, or on another system, nothing happens: importing
    torch reports what is wrong.
    """
    # Read when libgomp is loaded. By default its threads spin while they wait for each other, and where a CPU is
    # shared with HTTP, decoding or a build, the one that is waited for is the one that does not run: an encode of
    # 20 ms took 800 ms.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    torch = find_spec("torch")
    if os.name != "posix" or torch is None or torch.origin is None:
        return
    import ctypes  # noqa: PLC0415  its calls of functions release the lock; its loading of libraries does not

    folder = Path(torch.origin).parent / "lib"
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    # As torch does: its dependencies' symbols for all, its own for itself. Not libtorch_python, which uses Python.
    dlopen(os.fsencode(folder / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL)
    dlopen(os.fsencode(folder / "libtorch.so"), os.RTLD_NOW)
