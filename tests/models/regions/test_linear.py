"""A decoder's linear layer is torch's; compiled for one row on a CPU it is one loop over the weights."""

import pytest
import torch
import torch.nn.functional as F
from support.parity.compiled import run_compiled
from torch import Tensor

from snapcap.models.layers.linear import _rounded, linear

LARGE, SMALL = (512, 256), (512, 255)


class Layer(torch.nn.Module):
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)


def tensors(shape: tuple[int, ...], weights: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(*shape, weights[1], dtype=dtype),
        torch.randn(weights, dtype=dtype) * 0.05,
        torch.randn(weights[0], dtype=dtype),
    )


def operators(module: torch.nn.Module) -> set[str]:
    assert isinstance(module, torch.fx.GraphModule)
    return {str(node.target) for node in module.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_row_of_a_large_layer_is_a_sum(shape: tuple[int, ...], dtype: torch.dtype, with_bias: bool) -> None:
    x, weight, bias = tensors(shape, LARGE, dtype)
    given = (x, weight, bias if with_bias else None)
    exported = torch.export.export(Layer(), given).module()
    assert "aten.linear.default" not in operators(exported)
    actual, expected = exported(*given), F.linear(*given)
    assert (actual.shape, actual.dtype) == (expected.shape, dtype)
    torch.testing.assert_close(actual, expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)


def test_a_rows_logits_are_those_that_a_larger_bucket_chooses_from() -> None:
    """Rounded to bfloat16, where ties are common, although a head reads them in fp32."""

    class Head(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return linear(x, weight).float()

    x, weight, _ = tensors((1,), LARGE, torch.bfloat16)
    logits = run_compiled(Head(), x, weight)
    assert torch.equal(logits, logits.bfloat16().float())
    torch.testing.assert_close(logits, F.linear(x, weight).float(), atol=1e-2, rtol=1e-2)
    extremes = torch.tensor([[float("inf"), -float("inf"), float("nan"), 1e38, -0.0, 1.00390625, 1.01171875]])
    assert torch.equal(_rounded(extremes).nan_to_num(7), extremes.bfloat16().float().nan_to_num(7))


@pytest.mark.parametrize(
    ("shape", "weights"), [((2,), LARGE), ((1, 2), LARGE), ((1,), SMALL)], ids=["rows", "tokens", "small"]
)
def test_anything_else_is_the_librarys_product(shape: tuple[int, ...], weights: tuple[int, int]) -> None:
    given = tensors(shape, weights, torch.float32)
    exported = torch.export.export(Layer(), given).module()
    assert "aten.linear.default" in operators(exported)
    assert torch.equal(exported(*given), F.linear(*given))


def test_it_is_the_librarys_product_where_nothing_is_compiled() -> None:
    x, weight, bias = tensors((1,), LARGE, torch.float32)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(linear(x, weight), F.linear(x, weight))
