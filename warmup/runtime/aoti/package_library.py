"""Puts shared libraries, that of a package above all, into files in memory, which the dynamic linker can load.

torch's own loader unpacks a package into a folder below the temporary one, and leaves it there when its process is
killed. Here nothing is made that somebody would have to find again to remove it.
"""

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from snapcap.warmup.machine.denied import memory_file
from snapcap.warmup.runtime.aoti.packages import MODEL_NAME

_MODELS = f"/data/aotinductor/{MODEL_NAME}/"
_METADATA = "_metadata.json"


# Names of the libraries that packages for a CPU link, and the name of the CPU library (`cpu_library`).
_TORCH = (b"libtorch_cpu.so", b"libtorch.so", b"libc10.so")
CPU_LIBRARY_SONAME = "snapcap"


def package_content(package: Path | IO[bytes], standalone: bool = False) -> bytes:
    """The shared library of a package.

    Args:
        package: its file, or its content, opened for reading.
        standalone: with the CPU library in the place of torch's, under a name that is no longer than theirs.

    Raises:
        OSError: it is not one library, or calls operators that only Python's dispatcher has.
        zipfile.BadZipFile, zlib.error: it is no package, or a damaged one.
    """
    content = _library(package)
    if not standalone:
        return content
    for name in _TORCH:
        ours = CPU_LIBRARY_SONAME.encode().ljust(len(name), b"\0")
        content = content.replace(b"\0" + name + b"\0", b"\0" + ours + b"\0")
    return content


@contextlib.contextmanager
def library_file(content: bytes) -> Iterator[str]:
    """The name under which a library can be loaded, inside the block; once loaded it stays usable.

    Raises:
        OSError: there is no room for it.
    """
    if not Path("/proc/self/fd").is_dir():  # another system than Linux
        with tempfile.NamedTemporaryFile(prefix="snapcap-", suffix=".so") as file:
            file.write(content)
            file.flush()
            yield file.name
        return
    descriptor = memory_file("snapcap-package", runs=True)
    with os.fdopen(descriptor, "wb", closefd=False) as memory:
        memory.write(content)
    # The descriptor stays open. The linker knows a library by its name: another library with the same descriptor
    # number would be taken for this one.
    yield f"/proc/self/fd/{descriptor}"


def _library(package: Path | IO[bytes]) -> bytes:
    with zipfile.ZipFile(package) as members:
        names = [name for name in members.namelist() if _MODELS in name]
        libraries = [name for name in names if name.endswith(".so")]
        if len(libraries) != 1:
            raise OSError(f"it holds {len(libraries)} libraries, not one")
        if any(name.endswith(".json") and not name.endswith(_METADATA) for name in names):
            # Operators that have no C function, which only a ProxyExecutor can call.
            raise OSError("it calls operators of Python's dispatcher")
        return members.read(libraries[0])
