"""DaViT's block of kernels on a GPU gives what the plain block does, of windows with a kernel and of others."""

import pytest
import torch
from support.parity.kernel_cases import DAVIT_CASES, davit_case, fused

from snapcap.warmup.runtime.compare import TOLERANCE, relative_difference

LARGER = ((2, (24, 36), 12, 128, 4, 4), (3, (48, 24), 12, 256, 8, 8), (1, (20, 33), 12, 64, 2, 2))


@pytest.mark.parametrize("case", [*DAVIT_CASES, *LARGER], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_block_of_kernels_gives_what_the_plain_one_does(
    case: tuple[int, tuple[int, int], int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    if device.type != "cuda":
        pytest.skip("KERNELS ARE CHECKED ON A GPU ALONE")
    torch.manual_seed(0)
    function, inputs = davit_case(*case)
    rounded = [tensor.to(device, dtype) for tensor in inputs]
    expected = function(*(tensor.float() for tensor in rounded))
    actual = fused(function)(*rounded)
    assert (actual.shape, actual.dtype) == (expected.shape, dtype)
    assert relative_difference(actual, expected) < TOLERANCE[dtype]
