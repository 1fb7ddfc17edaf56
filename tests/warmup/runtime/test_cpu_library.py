"""The CPU library's functions, beside torch's operators on the same numbers."""

import ctypes
import math
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints.cpu_library import LAYOUTS, compiled_library, laid_out
from torch import Tensor

from snapcap.warmup.runtime.aoti.native import Libtorch, NativeTensor
from snapcap.warmup.runtime.aoti.packages import AotiError
from snapcap.warmup.runtime.aoti.torch_packages import over_tensor, tensor_over

Double, Handle = ctypes.c_double, ctypes.c_void_p
FLOAT32 = ctypes.c_int32(6)  # the number of the dtype in the C interface


@pytest.fixture(scope="module", params=[1, 3], ids=["one_thread", "three_threads"])
def library(handle: int, request: pytest.FixtureRequest) -> Iterator[Any]:
    """What calls a function of the library by torch's name of the operator."""
    libtorch, functions = Libtorch(handle), ctypes.CDLL(None, handle=handle)
    libtorch.set_num_threads(request.param)

    def call(name: str, *arguments: Any, results: int = 0) -> list[Tensor]:
        kept = [over_tensor(libtorch, each) if isinstance(each, Tensor) else each for each in arguments]
        made = [Handle() for _ in range(results)]
        given = [Handle(each.handle) if isinstance(each, NativeTensor) else each for each in kept]
        if getattr(functions, f"aoti_torch_cpu_{name}")(*given, *map(ctypes.byref, made)) != 0:
            raise AotiError(name)
        return [tensor_over(NativeTensor(libtorch, each.value or 0)).clone() for each in made]

    yield call
    libtorch.set_num_threads(1)


def close(ours: Tensor, theirs: Tensor, depth: int = 1) -> None:
    """As two sums of so many numbers of about 1 that are added in another order."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * math.sqrt(depth) * 8, equal_nan=True)


SIZES = st.one_of(st.integers(1, 40), st.sampled_from((63, 64, 65, 97, 129)))


@settings(max_examples=150)
@given(
    rows=SIZES,
    columns=SIZES,
    depth=st.one_of(SIZES, st.sampled_from((383, 384, 385, 800))),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    added=st.sampled_from(("row", "column", "one", "whole", "turned")),
    factors=st.sampled_from(((1.0, 1.0), (0.0, 1.0), (0.5, 2.0))),
    out_layout=st.sampled_from(("rows", "columns")),
)
def test_products_are_torchs(
    library: Any,
    rows: int,
    columns: int,
    depth: int,
    layouts: tuple[str, str],
    added: str,
    factors: tuple[float, float],
    out_layout: str,
) -> None:
    left, right = laid_out((rows, depth), layouts[0], 1), laid_out((depth, columns), layouts[1], 2)
    shapes = {"row": (columns,), "column": (rows, 1), "one": (1, 1)}
    plus = (
        laid_out((rows, columns), "columns", 3)
        if added == "turned"
        else torch.randn(shapes.get(added, (rows, columns)), generator=torch.Generator().manual_seed(3))
    )
    out = torch.full_like(laid_out((rows, columns), out_layout), math.nan)
    beta, alpha = factors
    library("addmm_out", out, plus, left, right, Double(beta), Double(alpha))
    close(out, torch.addmm(plus, left, right, beta=beta, alpha=alpha), depth * math.ceil(alpha**2))
    out.fill_(math.nan)
    library("mm_out", out, left, right)
    close(out, left @ right, depth)


@pytest.mark.parametrize("shape", [(1, 4, 5, 6), (7, 1, 33, 8), (3, 65, 40, 30), (40, 30, 64, 64)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_of_batches_are_torchs(library: Any, shape: tuple[int, ...], layout: str) -> None:
    batch, rows, columns, depth = shape
    left, right = laid_out((batch, rows, depth), layout, 1), laid_out((batch, depth, columns), layout, 2)
    out = torch.full((batch, rows, columns), math.nan)
    library("bmm_out", out, left, right)
    close(out, left @ right, depth)
    plus = torch.randn(rows, columns)
    library("baddbmm_out", out, plus, left, right, Double(2.0), Double(0.5))
    close(out, torch.baddbmm(plus, left, right, beta=2.0, alpha=0.5), depth)


def test_what_a_product_does_not_serve_is_refused(library: Any, capfd: pytest.CaptureFixture[str]) -> None:
    out, left = torch.empty(3, 5), torch.randn(3, 4)
    for right, reason in (
        (torch.randn(3, 5), "the shapes of a product do not fit"),
        (torch.randn(4, 5).bfloat16(), "products are served in float32"),
    ):
        with pytest.raises(AotiError):
            library("mm_out", out, left, right)
        assert reason in capfd.readouterr().err


EMPTY = """
import ctypes, sys, torch
from pathlib import Path
from snapcap.warmup.artifacts.manifest import VerifiedFile
from snapcap.warmup.runtime.aoti.native import Libtorch
from snapcap.warmup.runtime.aoti.packages import open_cpu_library
from snapcap.warmup.runtime.aoti.torch_packages import over_tensor

handle, Handle = open_cpu_library(VerifiedFile.of(Path(sys.argv[1]))), ctypes.c_void_p
libtorch, functions = Libtorch(handle), ctypes.CDLL(None, handle=handle)

def given(*tensors):
    kept.extend(made := [over_tensor(libtorch, each) for each in tensors])
    return [Handle(each.handle) for each in made]

kept, out = [], [ctypes.byref(Handle()) for _ in range(2)]
print(functions.aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(
    *given(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 0, 4), torch.ones(1, 1, 0, 4)),
    *(ctypes.c_double(0), 0, None, None, *out),
))
print(functions.aoti_torch_cpu__weight_int8pack_mm(
    *given(torch.ones(20, 0), torch.ones(3, 0, dtype=torch.int8), torch.ones(3)), out[0]))
"""


def test_attention_without_keys_and_products_without_depth_are_refused(handle: int, tmp_path: Path) -> None:
    """In a process of its own, which a division by 0 would end."""
    command = [sys.executable, "-c", EMPTY, str(compiled_library(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("1\n1\n", 0), done.stderr


def attention(
    library: Any,
    *inputs: Tensor,
    mask: NativeTensor | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> list[Tensor]:
    """Its result and the logarithms of its sums."""
    of_mask = None if mask is None else ctypes.byref(Handle(mask.handle))
    of_scale = None if scale is None else ctypes.byref(Double(scale))
    name = "_scaled_dot_product_flash_attention_for_cpu"
    return list(library(name, *inputs, Double(0.0), ctypes.c_int32(causal), of_mask, of_scale, results=2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "width"),
    [(1, 1, 4), (5, 5, 32), (65, 65, 32), (17, 40, 24), (197, 197, 64), (600, 130, 16)],
)
def test_attention_is_torchs(library: Any, queries: int, keys: int, width: int, causal: bool) -> None:
    torch.manual_seed(queries)
    query = torch.randn(2, queries, 3, width).transpose(1, 2)
    key, value = torch.randn(2, keys, 2, 3, width).permute(2, 0, 3, 1, 4).unbind(0)
    arguments = (query, key, value, 0.0, causal)
    theirs, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*arguments, scale=0.3)
    ours, our_sums = attention(library, query, key, value, causal=causal, scale=0.3)
    close(ours, theirs, keys)
    close(our_sums, sums, keys)
    given, _ = attention(library, query, key, value)
    expected, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    close(given, expected, keys)


@pytest.mark.parametrize("shape", [(2, 3, 33, 40), (1, 1, 33, 40), (2, 1, 1, 40), (33, 40), (33, 1)])
def test_attention_with_a_mask_is_torchs(library: Any, handle: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, length, 24) for length in (33, 40, 40))
    mask = torch.where(torch.rand(shape) < 0.3, -math.inf, torch.randn(shape))
    if shape[-1] > 1:
        mask[..., 0] = 0  # something is seen
    else:
        mask = torch.randn(shape)
    ours, _ = attention(library, query, key, value, mask=over_tensor(Libtorch(handle), mask))
    close(ours, torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask), 40)


def test_who_may_see_nothing_gets_nothing(library: Any, handle: int) -> None:
    query, key, value = (torch.randn(1, 2, 5, 16) for _ in range(3))
    mask = torch.zeros(5, 5)
    mask[2] = -math.inf
    ours, sums = attention(library, query, key, value, mask=over_tensor(Libtorch(handle), mask))
    assert torch.equal(ours[:, :, 2], torch.zeros(1, 2, 16))
    assert torch.isfinite(ours).all()
    assert (sums[:, :, 2] == -math.inf).all()


NUMBERS = torch.tensor([3.0, math.nan, -1.0, 3.0, math.inf, -math.inf, 0.0, -0.0, 2.5])


@pytest.mark.parametrize("descending", [False, True])
def test_sorting_is_torchs(library: Any, descending: bool) -> None:
    for numbers in (NUMBERS, torch.randn(4, 300), torch.randn(4, 600)[:, ::2], torch.randint(0, 9, (3, 2, 50))):
        values, places = library(
            "sort_stable", numbers, None, ctypes.c_int64(-1), ctypes.c_int32(descending), results=2
        )
        expected = torch.sort(numbers, stable=True, dim=-1, descending=descending)
        torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(places, expected.indices)


@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize("largest", [False, True])
def test_the_best_are_torchs(library: Any, count: int, largest: bool) -> None:
    for numbers in (NUMBERS, torch.randn(4, 300), torch.arange(18).view(2, 9)):
        arguments = (ctypes.c_int64(count), ctypes.c_int64(-1), ctypes.c_int32(largest), ctypes.c_int32(1))
        values, places = library("topk", numbers, *arguments, results=2)
        expected = numbers.topk(count, largest=largest)
        torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(numbers.gather(-1, places), values, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(AotiError):
        library("topk", NUMBERS, ctypes.c_int64(10), *arguments[1:], results=2)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_sums_are_torchs(library: Any, dim: int) -> None:
    numbers = torch.rand(5, 70, generator=torch.Generator().manual_seed(0))
    for each in (numbers, numbers[:, ::3], numbers > 0.5, (numbers * 100).long()):
        (sums,) = library("cumsum", each, ctypes.c_int64(dim), None, results=1)
        assert torch.equal(sums, each.cumsum(dim)), each.dtype


@pytest.mark.parametrize("numbers", [torch.rand(7, 5).T, torch.rand(7, 10).T[::2]], ids=["close", "with gaps"])
def test_an_order_that_torch_would_keep_of_sorted_numbers_is_refused(
    numbers: Tensor, library: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Results lie row by row, and a package was compiled for torch's strides."""
    assert torch.sort(numbers, dim=-1).values.stride() == (1, 5)
    with pytest.raises(AotiError):
        library("sort_stable", numbers, None, ctypes.c_int64(-1), ctypes.c_int32(0), results=2)
    assert "in another order" in capfd.readouterr().err


def test_an_order_that_torch_would_keep_is_refused(library: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Results lie row by row, and a package was compiled for torch's strides."""
    with pytest.raises(AotiError):
        library("cumsum", torch.rand(5, 7).T, ctypes.c_int64(1), None, results=1)
    assert "in another order" in capfd.readouterr().err


def test_the_least_of_what_is_scattered_is_torchs(library: Any, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    index, source, held = torch.randint(0, 30, (4, 50)), torch.randn(4, 50), torch.randn(4, 30)
    source[0, 0] = -math.inf
    expected, out = held.scatter_reduce(1, index, source, "amin"), torch.empty_like(held)
    arguments = (ctypes.c_int64(1), index, source, ctypes.c_char_p(b"amin"), ctypes.c_int32(1))
    library("scatter_reduce_two_out", out, held, *arguments)
    assert torch.equal(out, expected)
    library("scatter_reduce_two_out", held, held, *arguments)  # in place
    assert torch.equal(held, expected)
    index[3, 7] = 30
    with pytest.raises(AotiError):
        library("scatter_reduce_two_out", held, held, *arguments)
    assert "an index is out of bounds" in capfd.readouterr().err


def test_elementary_functions_are_as_exact_as_those_of_sleef(handle: int, tmp_path: Path) -> None:
    """Called as packages call them, with whole vectors in registers: by a program that is compiled for it."""
    program = compiled_library(tmp_path, "functions")
    functions = ctypes.CDLL(str(program))
    numbers = np.concatenate(
        [
            np.linspace(-110, 95, 200_000, dtype=np.float32),
            np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-30, 88.72283, 88.7229, -87.33654, 1e4], np.float32),
        ]
    )
    numbers = np.resize(numbers, numbers.size // 16 * 16)
    for name in ("exp", "log", "sin", "cos", "tanh", "erf"):
        x = np.abs(numbers) if name == "log" else numbers
        made = np.empty_like(x)
        getattr(functions, f"every_{name}")(*(Handle(each.ctypes.data) for each in (x, made)), x.size)
        exact = getattr(torch, name)(torch.from_numpy(x).double())
        ours, theirs = torch.from_numpy(made), exact.float()
        assert torch.equal(ours.isnan(), theirs.isnan()), name
        finite = theirs.isfinite() & (theirs.abs() > 1.2e-38)
        assert torch.equal(ours[theirs.isinf()], theirs[theirs.isinf()]), name
        errors = ((ours.double() - exact).abs() / exact.abs())[finite]
        assert errors.max() <= 1.5 * 2**-23, (name, errors.max())


@settings(max_examples=100)
@given(
    rows=st.one_of(SIZES, st.integers(1, 8)),
    columns=SIZES,
    depth=st.one_of(SIZES, st.sampled_from((511, 512, 513, 1100))),
    size=st.sampled_from((1e-6, 1.0, 1e6)),
)
def test_a_product_by_int8_is_the_product_by_the_rounded_weights(
    rows: int, columns: int, depth: int, size: float, library: Any
) -> None:
    generator = torch.Generator().manual_seed(rows + 100 * columns + 10_000 * depth)
    x = torch.randn(rows, depth, generator=generator) * size
    weight = torch.randint(-127, 128, (columns, depth), generator=generator, dtype=torch.int8)
    scale = torch.rand(columns, generator=generator)
    x[0] = 0
    (ours,) = library("_weight_int8pack_mm", x, weight, scale, results=1)
    exact = x.double() @ weight.double().T * scale
    # Each number errs by at most half a step, which is 1 / 127 of a bound that few numbers exceed.
    sizes = x.abs().sort(dim=1, descending=True).values
    few = sizes[:, depth // 128, None]
    steps = torch.minimum(torch.maximum(3.77 * sizes.mean(dim=1, keepdim=True), 1.25 * few), sizes[:, :1]) / 127
    allowed = 0.51 * steps * (weight.abs().double().sum(dim=1) * scale) + 1e-6 * exact.abs()
    assert ((ours - exact).abs() <= allowed).all()
    assert not ours[0].any()


@pytest.mark.parametrize("rows", [1, 8, 30])
@pytest.mark.parametrize("large", [30.0, 1e4])
def test_a_few_large_inputs_do_not_make_a_product_by_int8_worse(rows: int, large: float, library: Any) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 1500, generator=generator)
    weight = torch.randint(-127, 128, (40, 1500), generator=generator, dtype=torch.int8)
    usual = (x.double() @ weight.double().T).norm()
    places = torch.tensor([0, 3, 511, 1024, 1499])
    x[:, places] *= large
    (ours,) = library("_weight_int8pack_mm", x, weight, torch.ones(40), results=1)
    error = (ours - x.double() @ weight.double().T).norm()
    assert error < 0.01 * usual
    assert error > 0.001 * usual, "inputs are rounded to 8 bits"


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-36, 1e30, 1e35])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_row_of_zeros_but_for_some_numbers_is_multiplied_by_int8(
    rows: int, size: float, count: int, library: Any
) -> None:
    """They may be tiny or huge."""
    x = torch.zeros(rows, 300)
    x[:, torch.arange(count) * 7] = size
    (ours,) = library("_weight_int8pack_mm", x, torch.ones(5, 300, dtype=torch.int8), torch.ones(5), results=1)
    assert torch.allclose(ours, torch.full((rows, 5), count * size), rtol=1e-2, atol=2e-38 * count)


def test_a_row_by_int8_is_the_same_alone_and_among_others(library: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 1030, generator=generator)
    weight = torch.randint(-127, 128, (77, 1030), generator=generator, dtype=torch.int8)
    scale = torch.rand(77, generator=generator)
    (whole,) = library("_weight_int8pack_mm", x, weight, scale, results=1)
    for rows in (1, 2, 3, 4, 7, 8, 9, 50):
        (some,) = library("_weight_int8pack_mm", x[:rows], weight, scale, results=1)
        assert torch.equal(some, whole[:rows])


@pytest.mark.parametrize("depth", [10, 96, 700])
def test_a_row_of_one_number_is_exact_by_int8(depth: int, library: Any) -> None:
    """Its step is 1 / 127 of the number, or finer. The largest numbers of fp32 are in range."""
    for size in (1.0, 3e38):
        x = torch.zeros(1, depth)
        x[0, 7] = size
        (ours,) = library(
            "_weight_int8pack_mm", x, torch.ones(3, depth, dtype=torch.int8), torch.ones(3), results=1
        )
        torch.testing.assert_close(ours, torch.full((1, 3), size), rtol=1e-6, atol=0)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rows", [2, 20])
def test_a_row_with_no_number_has_no_result_by_int8(number: float, rows: int, library: Any) -> None:
    x, weight = torch.ones(rows, 40), torch.ones(5, 40, dtype=torch.int8)
    x[1, 33] = number
    (ours,) = library("_weight_int8pack_mm", x, weight, torch.ones(5), results=1)
    assert ours[1].isnan().all()
    assert torch.allclose(ours[0], torch.full((5,), 40.0), rtol=1e-6)


def test_memory_of_large_results_is_used_again(handle: int) -> None:
    """Otherwise the system would clear new pages for each result of this size."""
    libtorch, functions = Libtorch(handle), ctypes.CDLL(None, handle=handle)
    tensors = torch.ones(640, 16), torch.ones(1 << 14, 16, dtype=torch.int8), torch.ones(1 << 14)
    given = [over_tensor(libtorch, each) for each in tensors]

    def multiply() -> None:
        result = Handle()
        handles = [Handle(each.handle) for each in given]
        assert functions.aoti_torch_cpu__weight_int8pack_mm(*handles, ctypes.byref(result)) == 0
        NativeTensor(libtorch, result.value or 0)  # freed at once

    multiply()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        multiply()
    pages = 640 * (1 << 14) * 4 // resource.getpagesize()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def test_a_product_by_int8_that_lacks_memory_keeps_none(handle: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Its result of 1 MiB is made before the rows of int8, for which the memory does not suffice."""
    libtorch, functions = Libtorch(handle), ctypes.CDLL(None, handle=handle)
    rows = torch.ones(1, 1 << 16).expand(1 << 12, 1 << 16)
    tensors = rows, torch.ones(64, 1 << 16, dtype=torch.int8), torch.ones(64)
    given = [over_tensor(libtorch, each) for each in tensors]
    taken, (soft, hard) = [], resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + (128 << 20), hard))
    try:
        for _ in range(30):
            handles = [Handle(each.handle) for each in given]
            assert functions.aoti_torch_cpu__weight_int8pack_mm(*handles, ctypes.byref(Handle())) == 1
            taken.append(address_space())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert "bad_alloc" in capfd.readouterr().err
    assert taken[-1] - taken[0] < 8 << 20


def test_memory_that_is_kept_for_results_is_given_up_where_memory_lacks(
    handle: int, capfd: pytest.CaptureFixture[str]
) -> None:
    libtorch, (soft, hard) = Libtorch(handle), resource.getrlimit(resource.RLIMIT_AS)
    for each in [libtorch.empty("uint8", (100 << 20,), (1,)) for _ in range(4)]:
        libtorch.delete(Handle(each))  # kept
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + (50 << 20), hard))
    try:
        libtorch.delete(Handle(libtorch.empty("uint8", (300 << 20,), (1,))))
        with pytest.raises(AotiError):
            libtorch.empty("uint8", (1 << 40,), (1,))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert capfd.readouterr().err.count("bad_alloc") == 1


def test_bytes_are_read_as_numbers(library: Any) -> None:
    numbers = torch.tensor([1.5, -2.0, 3.25])
    (read,) = library("view_dtype", numbers.view(torch.int8), FLOAT32, results=1)
    assert torch.equal(read, numbers)
    with pytest.raises(AotiError):
        library("view_dtype", torch.zeros(7, dtype=torch.int8), FLOAT32, results=1)
