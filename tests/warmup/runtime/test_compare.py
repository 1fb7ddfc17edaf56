"""What is compared of a compiled region: its numbers, and how they lie."""

import pytest
import torch
import torch._inductor.config
from torch import Tensor

from snapcap.warmup.plan.plan import inductor_options
from snapcap.warmup.runtime.compare import CheckError, compare_call


def head(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden @ weight.mT


def padded_head(hidden: Tensor, weight: Tensor) -> Tensor:
    """As Inductor's pass for products has it: columns up to a multiple of 4, then those that were asked for."""
    more = torch.zeros(-len(weight) % 4, weight.shape[1])
    return head(hidden, torch.cat([weight, more]))[:, : len(weight)]


@pytest.mark.parametrize(("rows", "vocabulary", "fits"), [(4, 397, False), (4, 400, True), (1, 397, True)])
def test_a_result_whose_rows_lie_apart_is_refused(rows: int, vocabulary: int, fits: bool) -> None:
    inputs = torch.randn(rows, 8), torch.randn(vocabulary, 8)
    if fits:
        assert compare_call(head, padded_head, inputs, torch.float32) < 1e-6
        return
    with pytest.raises(CheckError, match=r"output \[4, 397\] is not contiguous: its strides are \[400, 1\]"):
        compare_call(head, padded_head, inputs, torch.float32)


def test_no_product_is_padded_for_a_gpu() -> None:
    """Inductor would pad where a benchmark says so, once in a few builds."""
    assert inductor_options("default", "cuda")["shape_padding"] is False
    assert "shape_padding" in torch._inductor.config.get_config_copy()
