"""The CPU library's threads: the bits of one, several callers, processes that fork, and parallel regions."""

import ctypes
import math
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints.cpu_library import LAYOUTS, compiled_library, laid_out
from torch import Tensor

from snapcap.warmup.machine.denied import library_file
from snapcap.warmup.machine.installation import require_compiler
from snapcap.warmup.runtime.aoti.native import Libtorch
from snapcap.warmup.runtime.aoti.packages import package_content
from snapcap.warmup.runtime.aoti.torch_packages import over_tensor

Double, Handle = ctypes.c_double, ctypes.c_void_p


@settings(max_examples=40)
@given(
    rows=st.integers(1, 200),
    columns=st.integers(100, 300),
    depth=st.sampled_from((200, 384, 800)),
    layout=st.sampled_from(LAYOUTS),
    added=st.sampled_from(("rows", "columns")),
    factors=st.sampled_from(((1.0, 1.0), (0.3, 1.0), (0.3, -1.7))),
)
def test_products_are_the_same_to_the_last_bit_with_any_number_of_threads(
    handle: int, rows: int, columns: int, depth: int, layout: str, added: str, factors: tuple[float, float]
) -> None:
    libtorch, functions = Libtorch(handle), ctypes.CDLL(None, handle=handle)
    given_ = (
        laid_out((rows, columns), added, 1),
        laid_out((rows, depth), "rows", 2),
        laid_out((depth, columns), layout, 3),
    )
    found = []
    for threads in (1, 2, 16):
        libtorch.set_num_threads(threads)
        out = torch.full((rows, columns), math.nan)
        handles = [over_tensor(libtorch, each) for each in (out, *given_)]
        arguments = [Handle(each.handle) for each in handles]
        assert functions.aoti_torch_cpu_addmm_out(*arguments, *map(Double, factors)) == 0
        found.append(out)
    libtorch.set_num_threads(1)
    assert all(torch.equal(each, found[0]) for each in found)


FORKED = """
import os, signal, sys, torch
from pathlib import Path
from snapcap.warmup.runtime.aoti.packages import open_cpu_library
from snapcap.warmup.machine.denied import library_file
from snapcap.warmup.machine.installation import require_compiler
from snapcap.warmup.runtime.aoti.native import Libtorch
from snapcap.warmup.runtime.aoti.packages import package_content
from snapcap.warmup.runtime.aoti.torch_packages import over_tensor
from snapcap.warmup.artifacts.manifest import VerifiedFile
import ctypes

handle = open_cpu_library(VerifiedFile.of(Path(sys.argv[1])))
libtorch, functions = Libtorch(handle), ctypes.CDLL(None, handle=handle)
libtorch.set_num_threads(4)

def product() -> None:
    tensors = [over_tensor(libtorch, torch.ones(shape)) for shape in ((200, 300), (200, 400), (400, 300))]
    for _ in range(25):
        assert functions.aoti_torch_cpu_mm_out(*(ctypes.c_void_p(each.handle) for each in tensors)) == 0

product()
children = []
for _ in range(10):
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        product()
        os._exit(0)
    children.append(child)
    product()
print([os.waitpid(child, 0)[1] for child in children])
"""


def test_a_process_that_forks_has_helpers_of_its_own(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FORKED, str(compiled_library(tmp_path))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.stdout == f"{[0] * 10}\n", run.stderr


def test_products_of_several_callers_at_once_are_those_of_one_thread(handle: int) -> None:
    """One of them has the helpers, the others go without; nobody waits for anybody."""
    libtorch, functions = Libtorch(handle), ctypes.CDLL(None, handle=handle)

    def products(seed: int, turns: int) -> list[Tensor]:
        left, right = laid_out((130, 192), "rows", seed), laid_out((192, 384), "rows", seed + 1)
        made = [torch.full((130, 384), math.nan) for _ in range(turns)]
        handles = [over_tensor(libtorch, each) for each in (left, right, *made)]
        given = [Handle(each.handle) for each in handles]
        assert all(functions.aoti_torch_cpu_mm_out(out, *given[:2]) == 0 for out in given[2:])
        return made

    libtorch.set_num_threads(1)
    expected = [products(seed, 1)[0] for seed in range(4)]
    libtorch.set_num_threads(4)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda seed: products(seed, 200), range(4)))
    finally:
        libtorch.set_num_threads(1)
    for made, alone in zip(found, expected, strict=True):
        assert all(torch.equal(each, alone) for each in made)


REGIONS = """
#include <omp.h>
#include <unistd.h>
#include <atomic>

// What Inductor writes: loops between which threads wait, and blocks of one thread. `found`: how many threads there
// are, how many of them are different ones, and how often a block of one thread and one of a region inside has run.
extern "C" void regions(int threads, int count, long* numbers, long* found) {
  std::atomic<long> singles{0}, inner{0};
  long* tids = numbers + count;
  #pragma omp parallel num_threads(threads)
  {
    found[0] = omp_get_num_threads();
    tids[omp_get_thread_num()] = gettid();
    #pragma omp for
    for (int i = 0; i < count; ++i) numbers[i] = i;
    for (int turn = 0; turn < 50; ++turn) {
      #pragma omp single
      { ++singles; numbers[0] += numbers[count - 1]; }
      #pragma omp for
      for (int i = 1; i < count; ++i) numbers[i] += numbers[0];
    }
    #pragma omp parallel num_threads(threads)
    { inner += omp_get_num_threads(); }
  }
  found[1] = 0;
  for (int i = 0; i < found[0]; ++i) {
    bool first = true;
    for (int j = 0; j < i; ++j) first = first && tids[i] != tids[j];
    found[1] += first;
  }
  found[2] = singles;
  found[3] = inner;
}
"""


@pytest.fixture
def regions(handle: int, tmp_path: Path) -> "ctypes._NamedFuncPointer":
    """The function of a package's library, which has been opened without libtorch."""
    library, package = tmp_path / "model.so", tmp_path / "model.pt2"
    command = [require_compiler(), "-O2", "-fopenmp", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=REGIONS, text=True, check=True)
    with zipfile.ZipFile(package, "w") as members:
        members.write(library, "package/data/aotinductor/model/model.so")
    with library_file(package_content(package, standalone=True)) as name:
        return ctypes.CDLL(name).regions


def run_regions(regions: "ctypes._NamedFuncPointer", threads: int) -> tuple[list[int], list[int]]:
    """Returns numbers that every thread has had to wait for, and what the function found."""
    numbers, found = (ctypes.c_long * 164)(), (ctypes.c_long * 4)()
    regions(threads, 100, numbers, found)
    return list(numbers)[:100], list(found)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_threads_of_a_parallel_region_wait_for_each_other(
    regions: "ctypes._NamedFuncPointer", threads: int
) -> None:
    expected, _ = run_regions(regions, 1)
    for _ in range(20):
        numbers, found = run_regions(regions, threads)
        assert numbers == expected
        assert found == [threads, threads, 50, threads], "a region inside another one has one thread"


def test_parallel_regions_of_several_callers_at_once_are_those_of_one_thread(
    regions: "ctypes._NamedFuncPointer",
) -> None:
    expected, _ = run_regions(regions, 1)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: run_regions(regions, 4), range(400)))
    assert all(numbers == expected for numbers, _ in results)
    assert {found[0] for _, found in results} == {1, 4}, "one caller has the helpers, the others go without"
