"""Libraries that are mapped through dlopen itself."""

import ctypes
import ctypes.util
from pathlib import Path

import pytest

from snapcap.warmup.machine.cuda_driver import open_library


def test_a_library_can_be_called() -> None:
    name = ctypes.util.find_library("m")
    assert name is not None
    cos = ctypes.CDLL(name, handle=open_library(name)).cos
    cos.argtypes, cos.restype = (ctypes.c_double,), ctypes.c_double
    assert cos(0.0) == 1.0


def test_one_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    with pytest.raises(OSError, match=r"broken\.so: cannot open shared object file"):
        open_library(broken)
    broken.write_bytes(b"no library")
    with pytest.raises(OSError, match=r"broken\.so: (file too short|invalid ELF header)"):
        open_library(broken)
