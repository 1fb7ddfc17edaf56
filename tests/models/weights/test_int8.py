"""Weights of int8: each linear layer of each family is rounded, and computes with the rounded weights."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.parity import device_cases
from support.parity.device_cases import Captioner, open_model, open_runner, plan_of, steps_with_logits
from torch import Tensor

from snapcap.models.layers.linear import linear, quantised
from snapcap.models.regions.table import Weights
from snapcap.warmup.plan.plan import Bucket
from snapcap.warmup.runtime.model import EagerBackend
from snapcap.warmup.runtime.slot_request import SlotRequest

FAMILIES: Mapping[str, Callable[[Path], Captioner]] = {
    "vit-gpt2": device_cases.vit_gpt2,
    "blip": device_cases.blip,
    "git": device_cases.git,
    "smolvlm": device_cases.smolvlm,
    "florence2": device_cases.florence2,
    "llava": device_cases.llava,
    "qwen3-vl": device_cases.qwen3_vl,
    # As many heads of keys as of queries.
    "smolvlm, all heads": partial(device_cases.smolvlm, kv_heads=6),
    "qwen3-vl, all heads": partial(device_cases.qwen3_vl, kv_heads=6),
}
SHARING = ("smolvlm", "llava", "qwen3-vl")  # heads of queries share keys: those of images stay in fp32
# Regions that only look up embeddings, cut an image into patches, or add features have no weight in int8.
WITHOUT = (
    "encoder_before",
    "prefix_tap",
    "decoder_before",
    "decoder_penalties",
    "decoder_sampling",
    "decoder_beams",
)
CPU = torch.device("cpu")


def rounded(weight: Tensor) -> Tensor:
    """The weight [out, in] that a layer computes with, in fp32."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return torch.where(scale > 0, (weight / scale).round(), torch.zeros(())) * scale


def test_a_weight_is_rounded_in_steps_of_each_output() -> None:
    torch.manual_seed(0)
    weight = torch.randn(30, 24) * torch.logspace(-4, 4, 30).unsqueeze(1)
    weight[3] = 0
    one = quantised(weight)
    assert (one.dtype, one.shape) == (torch.int8, (30 * 24 + 30 * 4,))
    x, bias = torch.randn(2, 5, 24), torch.randn(30)
    torch.testing.assert_close(linear(x, one, bias), F.linear(x, rounded(weight), bias), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(linear(x, one), F.linear(x, rounded(weight)), rtol=1e-4, atol=1e-4)
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((rounded(weight) - weight).abs() <= step / 2 * 1.0001).all()


@pytest.mark.parametrize("outputs", [slice(-12, None), slice(6, 18)])
def test_some_outputs_of_a_layer_are_those_of_the_whole(outputs: slice) -> None:
    weight, bias, x = torch.randn(30, 24), torch.randn(30), torch.randn(3, 24)
    for each in (weight, quantised(weight)):
        torch.testing.assert_close(linear(x, each, bias, outputs), linear(x, each, bias)[:, outputs])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_what_it_does_with_the_rounded_weights_in_fp32(family: str, tmp_path: Path) -> None:
    captioner = FAMILIES[family](tmp_path)
    plan = plan_of(CPU, "int8", (1, 2))
    model, plain = open_model(captioner, plan), open_model(captioner, replace(plan, dtype="float32"))
    state = model.state
    assert {each.dtype for each in (state.key, state.value)} == {model.dtype} == {torch.float32}
    image = torch.float32 if family in SHARING else torch.bfloat16
    assert {each.dtype for each in (state.cross_key, state.cross_value)} == {image}
    assert plain.state.cross_key.dtype == torch.float32
    sets: dict[str, tuple[tuple[Tensor, ...], ...]] = {}
    for name, layers in plain.weights.sets.items():
        ours = model.weights.sets[name]
        assert any(each.dtype == torch.int8 for layer in ours for each in layer) is (
            not name.startswith(WITHOUT)
        ), name
        sets[name] = tuple(
            tuple(
                one if other.dtype == one.dtype else as_read(one, other) for one, other in zip(*each, strict=True)
            )
            for each in zip(layers, ours, strict=True)
        )
    images = captioner.images(2)
    answers = []
    for each in (model, replace(plain, weights=Weights(sets), state=state.zeroed())):
        runner = open_runner(each, plan, EagerBackend())
        runner.encode(Bucket(2), images, 0)
        answers.append(steps_with_logits(runner, Bucket(2), [SlotRequest()] * 2, 8))
    (tokens, logits), (expected, expected_logits) = answers
    assert tokens == expected
    torch.testing.assert_close(logits, expected_logits, atol=2e-4, rtol=2e-4)


def as_read(weight: Tensor, of_int8: Tensor) -> Tensor:
    """The numbers of a weight of int8, shaped as ``weight``, which GPT-2 has as [in, out]."""
    inputs = next(each for each in weight.shape if of_int8.numel() == weight.numel() + 4 * (weight.numel() // each))
    numbers, scale = of_int8[: weight.numel()].view(-1, inputs), of_int8[weight.numel() :].view(torch.float32)
    found = numbers.float() * scale.unsqueeze(1)
    for each in (found, found.t()):
        if each.shape == weight.shape and (each - weight).abs().max() <= weight.abs().max() / 200:
            return each.contiguous()
    raise AssertionError("the numbers are not those of the weight")
