"""The driver's calls, to a library that stands in for libcuda."""

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from snapcap.warmup.machine import cuda_driver, installation
from snapcap.warmup.machine.cuda_driver import (
    CudaDriverError,
    cuda_device,
    cuda_device_count,
    open_context,
    open_library,
    total_device_memory,
)
from snapcap.warmup.machine.installation import TorchVersion
from snapcap.warmup.machine.torch_libraries import begin_device_context

SOURCE = """
#include <stddef.h>
static int devices = 2, retained = -1;
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) { *count = devices; return 0; }
int cuDeviceGet(int *device, int index) { *device = 10 + index; return index < devices ? 0 : 101; }
int cuDeviceGetName(char *name, int length, int device) { name[0] = 'G'; name[1] = '0' + device - 10; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = ((size_t)80 << 30) + device; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &retained; retained = device; return 0; }
int retained_device(void) { int device = retained; retained = -1; return device; }
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
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What threads raised."""
    raised: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: raised.append(str(arguments.exc_value)))
    return raised


@pytest.fixture
def driver(library: str, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    opens: Callable[[str], int] = {"libcuda.so.1": open_library(library)}.__getitem__
    monkeypatch.setattr(cuda_driver, "open_library", opens)
    return ctypes.CDLL(library)


def test_a_device_says_what_code_is_made_for(driver: ctypes.CDLL) -> None:
    device = cuda_device(1)
    assert (device.name, device.compute_capability, device.multiprocessors) == ("G1", "75.76", 16)
    assert cuda_device_count() == 2


def test_a_device_tells_its_memory_without_a_context(driver: ctypes.CDLL) -> None:
    driver.retained_device()
    assert total_device_memory(1) == (80 << 30) + 11
    assert driver.retained_device() == -1
    with pytest.raises(CudaDriverError, match="cuDeviceGet failed with code 101"):
        total_device_memory(2)


def test_the_context_is_that_of_the_device(driver: ctypes.CDLL) -> None:
    open_context(1)
    assert driver.retained_device() == 11


def test_a_device_that_is_not_there_is_an_error_with_the_call(driver: ctypes.CDLL) -> None:
    with pytest.raises(CudaDriverError, match="cuDeviceGet failed with code 101"):
        open_context(2)


@pytest.mark.parametrize(
    ("device", "cuda", "retained"),
    [("cuda:1", "13.0", 11), ("cuda", "13.0", 10), ("auto", "13.0", 10), ("auto", None, -1), ("cpu", "13.0", -1)],
)
def test_a_start_begins_the_context_of_the_device_that_it_is_going_to_use(
    device: str, cuda: str | None, retained: int, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "torch_version", lambda: TorchVersion("2", "", cuda))
    driver.retained_device()
    begin_device_context(device)
    for thread in threading.enumerate():
        if thread.name == "device-context":
            thread.join()
    assert driver.retained_device() == retained


def test_a_context_that_cannot_be_made_is_for_torch_to_report(driver: ctypes.CDLL, threads: list[str]) -> None:
    begin_device_context("cuda:2")
    for thread in threading.enumerate():
        if thread.name == "device-context":
            thread.join()
    assert threads == []


def test_without_a_driver_there_is_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_driver, "open_library", lambda name: open_library(tmp_path / name))
    assert cuda_device_count() == 0
    with pytest.raises(CudaDriverError, match="no CUDA driver"):
        open_context(0)
