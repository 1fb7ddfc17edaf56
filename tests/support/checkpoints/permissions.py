"""Takes the right to read a file away from this process, also where it is root's."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_Set = ctypes.c_uint32 * 6  # effective, permitted and inheritable, of the first 32 capabilities and the others


@contextlib.contextmanager
def denied(path: Path) -> Iterator[None]:
    """Within the block neither a file's content nor what is in a folder can be read by this thread."""
    mode = path.stat().st_mode
    path.chmod(0)
    libc = ctypes.CDLL(None, use_errno=True)
    header, before = (ctypes.c_uint32 * 2)(_VERSION, 0), _Set()

    def call(name: str, capabilities: ctypes.Array[ctypes.c_uint32]) -> None:
        if getattr(libc, name)(header, capabilities):
            raise OSError(ctypes.get_errno(), name)

    call("capget", before)
    call("capset", _Set(before[0] & ~_OVERRIDES, *before[1:]))
    try:
        assert not os.access(path, os.R_OK, effective_ids=True)
        yield
    finally:
        call("capset", before)
        path.chmod(mode)
