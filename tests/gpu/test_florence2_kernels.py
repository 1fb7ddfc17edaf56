"""Florence-2's encoder of kernels on a GPU gives what the plain one does, where there are kernels and elsewhere."""

from typing import Any

import pytest
import torch
from support.parity.kernel_cases import (
    BART_CASES,
    DAVIT_CASES,
    PIXELS_CASES,
    bart_case,
    davit_case,
    fused,
    pixels_case,
)
from torch import Tensor

from snapcap.models.layers.weights import RegionFunction
from snapcap.warmup.runtime.compare import TOLERANCE, relative_difference

LARGER = (
    (2, (24, 36), 12, 128, 4, 4),
    (3, (48, 24), 12, 256, 8, 8),
    (1, (20, 33), 12, 64, 2, 2),
    (1, (32, 32), 16, 64, 2, 2),  # windows of as many tokens as have a kernel
    (2, (24, 24), 12, 2048, 64, 64),
)


def check(function: RegionFunction, inputs: list[Tensor], dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("KERNELS ARE CHECKED ON A GPU ALONE")
    rounded = [tensor.to(device, dtype if tensor.is_floating_point() else None) for tensor in inputs]
    expected = function(*(tensor.float() if tensor.is_floating_point() else tensor for tensor in rounded))
    actual = fused(function)(*rounded)
    assert (actual.shape, actual.dtype) == (expected.shape, dtype)
    assert relative_difference(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("case", [*DAVIT_CASES, *LARGER], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_block_gives_what_the_plain_one_does(case: Any, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    check(*davit_case(*case), dtype, device)


@pytest.mark.parametrize("case", [*PIXELS_CASES, (2, (768, 768), 128, 7, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pixels_give_what_the_plain_ones_do(case: Any, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    check(*pixels_case(*case), dtype, device)


@pytest.mark.parametrize("case", [*BART_CASES, (2, 592, 12, 64), (17, 592, 16, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_layer_over_a_padded_text_gives_what_the_plain_one_does(
    case: Any, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    check(*bart_case(*case), dtype, device)
