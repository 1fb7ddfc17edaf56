"""Extracts the shared library of a package into a file in memory, which the dynamic linker can load.

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

from snapcap.warmup.runtime.aoti.packages import MODEL_NAME

_MODELS = f"/data/aotinductor/{MODEL_NAME}/"
_METADATA = "_metadata.json"


@contextlib.contextmanager
def library_file(package: Path | IO[bytes]) -> Iterator[str]:
    """The name under which the library of a package can be loaded, inside the block; once loaded it stays usable.

    ``package``: the package's file, or its content, opened for reading.

    Raises:
        OSError: it is not one library, or calls operators that only Python's dispatcher has.
        zipfile.BadZipFile, zlib.error: it is no package, or a damaged one.
    """
    content = _library(package)
    try:
        descriptor = os.memfd_create("snapcap-package", os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # another system than Linux, or one that forbids it
        with tempfile.NamedTemporaryFile(prefix="snapcap-", suffix=".so") as file:
            file.write(content)
            file.flush()
            yield file.name
        return
    with os.fdopen(descriptor, "wb", closefd=False) as memory:
        memory.write(content)
    # It stays open: the linker knows a library by its name, and would take it for the next one of this number.
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
