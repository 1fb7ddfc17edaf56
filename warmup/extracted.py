"""The folders into which AOTInductor's loader extracts packages.

The loader removes its folder when its model is destroyed, which a server's process does not live to see: it ends by
``os._exit`` or by a signal. Started again and again, it would fill the temporary folder of its machine.
"""

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_MARK = "/aotinductor_"  # and six random characters


def discard_mapped() -> None:
    """Remove the folders of all packages that this process has opened; an open library needs its file no more.

    Everything else of a package was read when it was opened: weights are inputs, and kernels are in the library.
    Elsewhere than on Linux, nothing.
    """
    if sys.platform == "linux":
        lines = _MAPS.read_text(errors="surrogateescape").splitlines()
        discard_folders(line for line in lines if not line.endswith(" (deleted)"))


def discard_folders(texts: Iterable[str]) -> None:
    """Remove the folder of each text that holds the path of an extracted file, as the loader's errors do."""
    for folder in {_folder(text) for text in texts if _MARK in text}:
        shutil.rmtree(folder, ignore_errors=True)


def _folder(text: str) -> str:
    begin, mark = text.index("/"), text.index(_MARK)
    end = text.find("/", mark + 1)
    return text[begin : end if end > 0 else None]
