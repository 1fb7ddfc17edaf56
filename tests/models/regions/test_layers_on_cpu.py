"""Layers that are written otherwise where they are compiled for a CPU are within rounding of torch's."""

import pytest
import torch
import torch.nn.functional as F
from support.parity.compiled import run_compiled
from torch import Tensor

from snapcap.models.layers.attention import attend, attend_all, attend_prefixed
from snapcap.models.layers.linear import activation


class Attention(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_all(query, key, value)


class Crossed(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, 0.3)


class Prefixed(torch.nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return attend_prefixed(*inputs, 0.3)  # type: ignore[arg-type]


class Activated(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._act = activation(name)

    def forward(self, x: Tensor) -> Tensor:
        return self._act(x)


def heads(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Query, key and value [B, H, T, d] as a block has them: views of one product."""
    batch, count, length, width = shape
    torch.manual_seed(0)
    return torch.randn(batch, length, 3, count, width).to(dtype).permute(2, 0, 3, 1, 4).unbind(0)


def operators(module: torch.nn.Module) -> list[str]:
    assert isinstance(module, torch.fx.GraphModule)
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("shape", "parts"),
    [((1, 12, 64, 64), 1), ((1, 12, 1024, 16), 3), ((2, 5, 700, 8), 2), ((2, 7, 1500, 8), 4), ((1, 1, 2300, 8), 1)],
    ids=str,
)
def test_attention_in_bfloat16_is_products_over_some_heads(shape: tuple[int, int, int, int], parts: int) -> None:
    given = heads(shape, torch.bfloat16)
    exported = torch.export.export(Attention(), given).module()
    assert operators(exported).count("aten.softmax.int") == parts
    assert "aten.scaled_dot_product_attention.default" not in operators(exported)
    actual, expected = exported(*given), F.scaled_dot_product_attention(*(each.float() for each in given))
    assert (actual.shape, actual.dtype) == (expected.shape, torch.bfloat16)
    torch.testing.assert_close(actual.float(), expected, atol=1e-2, rtol=2e-2)


def test_it_is_torchs_attention_in_fp32_and_where_nothing_is_compiled() -> None:
    given = heads((2, 3, 20, 16), torch.float32)
    assert "aten.scaled_dot_product_attention.default" in operators(
        torch.export.export(Attention(), given).module()
    )
    for each in (given, heads((2, 3, 20, 16), torch.bfloat16)):
        assert torch.equal(attend_all(*each), F.scaled_dot_product_attention(*each))


def image_kv() -> tuple[Tensor, Tensor]:
    """Keys [b, H, d, T] and values [b, H, T, d] in bfloat16."""
    return torch.randn(3, 2, 16, 21).bfloat16(), torch.randn(3, 2, 21, 16).bfloat16()


def test_cross_attention_in_fp32_reads_an_image_in_bfloat16() -> None:
    torch.manual_seed(0)
    query, (key, value) = torch.randn(3, 2, 16), image_kv()
    expected = attend(query, key.float(), value.float(), 0.3)
    assert expected.dtype == torch.float32
    for run in (Crossed(), torch.export.export(Crossed(), (query, key, value)).module()):
        torch.testing.assert_close(run(query, key, value), expected)


def test_attention_to_a_prefix_in_fp32_reads_an_image_in_bfloat16() -> None:
    torch.manual_seed(0)
    own = torch.randn(3, 2, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16), torch.tensor([0, 4, 5])
    caches, image = (torch.randn(3, 2, 16, 6), torch.randn(3, 2, 6, 16)), image_kv()
    expected = attend_prefixed(*own, *(each.clone() for each in caches), *(part.float() for part in image), 0.3)
    assert expected.dtype == torch.float32
    for run in (Prefixed(), torch.export.export(Prefixed(), (*own, *caches, *image)).module()):
        torch.testing.assert_close(run(*own, *(each.clone() for each in caches), *image), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tanh_of_gelu_is_a_sigmoid(dtype: torch.dtype) -> None:
    name = "gelu_new"
    x = torch.cat((torch.linspace(-20, 20, 4001), torch.tensor([-1e4, -0.0, 1e4, float("inf")]))).to(dtype)
    exported = torch.export.export(Activated(name), (x,)).module()
    assert "aten.sigmoid.default" in operators(exported)
    expected = F.gelu(x.float(), approximate="tanh")
    assert torch.equal(activation(name)(x), F.gelu(x, approximate="tanh"))
    if dtype == torch.float32:  # in 16 bits what is compiled rounds once, what is exported after each operation
        torch.testing.assert_close(exported(x), expected, atol=1e-6, rtol=1e-5)
    compiled = run_compiled(Activated(name), x)
    torch.testing.assert_close(
        compiled, expected.to(dtype), atol=1e-6 if dtype == torch.float32 else 1e-3, rtol=1e-2
    )
