"""The driver's calls, to a library that stands in for libcuda."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from warmup import cuda_driver
from warmup.cuda_driver import CudaDriverError, cuda_device, cuda_device_count, open_context
from warmup.dynamic_library import open_library

SOURCE = """
static int devices = 2, retained = -1;
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) { *count = devices; return 0; }
int cuDeviceGet(int *device, int index) { *device = 10 + index; return index < devices ? 0 : 101; }
int cuDeviceGetName(char *name, int length, int device) { name[0] = 'G'; name[1] = '0' + device - 10; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &retained; retained = device; return 0; }
int retained_device(void) { return retained; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("NO C COMPILER: the library that stands in for libcuda cannot be made")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(SOURCE)
    path = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, folder / "driver.c"], check=True)
    return str(path)


@pytest.fixture
def driver(library: str, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    opens: Callable[[str], int] = {"libcuda.so.1": open_library(library)}.__getitem__
    monkeypatch.setattr(cuda_driver, "open_library", opens)
    return ctypes.CDLL(library)


def test_a_device_says_what_code_is_made_for(driver: ctypes.CDLL) -> None:
    device = cuda_device(1)
    assert (device.name, device.compute_capability, device.multiprocessors) == ("G1", "75.76", 16)
    assert cuda_device_count() == 2


def test_the_context_is_that_of_the_device(driver: ctypes.CDLL) -> None:
    open_context(1)
    assert driver.retained_device() == 11


def test_a_device_that_is_not_there_is_an_error_with_the_call(driver: ctypes.CDLL) -> None:
    with pytest.raises(CudaDriverError, match="cuDeviceGet failed with code 101"):
        open_context(2)


def test_without_a_driver_there_is_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_driver, "open_library", lambda name: open_library(tmp_path / name))
    assert cuda_device_count() == 0
    with pytest.raises(CudaDriverError, match="no CUDA driver"):
        open_context(0)
