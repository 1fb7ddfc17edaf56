"""Checkpoint files of every layout and format: equal weights, or an error that names what is wrong."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.parity.parity import NORMALISATION, weight_bytes
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.errors import WeightsError
from snapcap.models.layers.weights import in_order, takes, takes_weights_of, weight_names
from snapcap.models.regions.table import Weights
from snapcap.models.weights.load import load_weights

SAFE, BIN = "model.safetensors", "pytorch_model.bin"

# transformers 5's own module names back to those of transformers 4, whose modules had the names of its files.
VERSION_4 = (
    (r"^encoder\.layers\.(\d+)\.attention\.([qkv])_proj", r"encoder.encoder.layer.\1.attention.attention.\2"),
    (r"^encoder\.layers\.(\d+)\.attention\.o_proj", r"encoder.encoder.layer.\1.attention.output.dense"),
    (r"^encoder\.layers\.(\d+)\.mlp\.fc1", r"encoder.encoder.layer.\1.intermediate.dense"),
    (r"^encoder\.layers\.(\d+)\.mlp\.fc2", r"encoder.encoder.layer.\1.output.dense"),
    (r"^encoder\.layers\.", "encoder.encoder.layer."),
    (r"attention\.q\.", "attention.query."),
    (r"attention\.k\.", "attention.key."),
    (r"attention\.v\.", "attention.value."),
)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(folder, ModelConfig.from_folder(folder), NORMALISATION, torch.device("cpu"), dtype)


def tensors_of(weights: Weights) -> list[Tensor]:
    return [tensor for layers in weights.sets.values() for layer in layers for tensor in layer]


def assert_equal(first: Weights, second: Weights) -> None:
    assert first.sets.keys() == second.sets.keys()
    for one, other in zip(tensors_of(first), tensors_of(second), strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def model(make_captioner: Callable[..., Any]) -> Any:
    return make_captioner({"hidden_size": 72}, {})


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tensors(saved: Path) -> dict[str, Tensor]:
    return load_file(saved / SAFE)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """The configuration without weights."""
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    return tmp_path


def contiguous(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def test_the_weights_are_those_of_the_model(saved: Path, model: Any) -> None:
    weights = load(saved).sets
    state = model.state_dict()
    rescale, mean, std, patch, *_ = weights["encoder_before"][0]
    assert rescale.item() == pytest.approx(NORMALISATION.rescale)
    assert (mean.tolist(), std.tolist()) == (
        pytest.approx(list(NORMALISATION.mean)),
        pytest.approx(list(NORMALISATION.std)),
    )
    assert torch.equal(patch, state["encoder.embeddings.patch_embeddings.projection.weight"].flatten(1))
    for layer in range(2):
        qkv = weights["encoder_block"][layer][2]
        parts = [state[f"encoder.layers.{layer}.attention.{part}_proj.weight"] for part in "qkv"]
        assert torch.equal(qkv, torch.cat(parts))
        fc1 = weights["decoder_block"][layer][14]
        assert torch.equal(fc1, state[f"decoder.transformer.h.{layer}.mlp.c_fc.weight"])
    cross = weights["encoder_after"][0][0]
    parts = [state[f"decoder.transformer.h.{layer}.crossattention.c_attn.weight"].t() for layer in range(2)]
    assert torch.equal(cross, torch.cat(parts))
    assert torch.equal(weights["encoder_after"][0][2], state["enc_to_dec_proj.weight"])


@pytest.mark.parametrize("kind", ["safetensors", "zip", "old pickle"])
@pytest.mark.parametrize("layout", ["saved", "version 5 modules", "version 4 modules"])
def test_every_layout_and_format_gives_equal_weights(
    saved: Path, folder: Path, model: Any, tensors: dict[str, Tensor], layout: str, kind: str
) -> None:
    state = tensors if layout == "saved" else model.state_dict()
    if layout == "version 4 modules":
        state = {_version_4(name): tensor for name, tensor in state.items()}
        assert state.keys() >= tensors.keys()
    elif layout == "version 5 modules":
        assert "encoder.layers.0.attention.q_proj.weight" in state
    if kind == "safetensors":
        save_file(contiguous(state), folder / SAFE)
    else:
        torch.save(state, folder / BIN, _use_new_zipfile_serialization=kind == "zip")
        assert ((folder / BIN).read_bytes()[:2] == b"PK") == (kind == "zip")
    assert_equal(load(folder), load(saved))


def _version_4(name: str) -> str:
    for pattern, target in VERSION_4:
        name = re.sub(pattern, target, name)
    return name


@pytest.mark.parametrize("kind", [SAFE, BIN])
def test_sharded_files_give_equal_weights(saved: Path, folder: Path, tensors: dict[str, Tensor], kind: str) -> None:
    stem, suffix = kind.split(".")
    shards: list[dict[str, Tensor]] = [{}, {}, {}]
    for index, (name, tensor) in enumerate(tensors.items()):
        shards[index % 3][name] = tensor
    places = {}
    for index, shard in enumerate(shards, start=1):
        file = f"{stem}-0000{index}-of-00003.{suffix}"
        places |= dict.fromkeys(shard, file)
        save_file(shard, folder / file) if kind == SAFE else torch.save(shard, folder / file)
    (folder / f"{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert_equal(load(folder), load(saved))
    missing = folder / next(iter(places.values()))
    missing.unlink()
    with pytest.raises(WeightsError, match=rf"index\.json names '{missing.name}', which is not in"):
        load(folder)


def test_safetensors_go_before_bin_and_a_file_before_an_index(saved: Path, folder: Path, tensors: Any) -> None:
    save_file(tensors, folder / SAFE)
    (folder / BIN).write_bytes(b"never read")
    (folder / f"{SAFE}.index.json").write_text("never read")
    assert_equal(load(folder), load(saved))


def test_buffers_and_heads_that_a_captioner_does_not_use_are_ignored(
    saved: Path, folder: Path, tensors: Any
) -> None:
    unused = {
        "encoder.embeddings.mask_token": torch.zeros(1, 1, 72),
        "decoder.transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8),
        "decoder.transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
        "decoder.transformer.h.0.crossattention.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool),
        "decoder.transformer.h.1.crossattention.masked_bias": torch.tensor(-1e4),
    }
    assert any("pooler" in name for name in tensors)
    save_file({**tensors, **unused}, folder / SAFE)
    assert_equal(load(folder), load(saved))


def test_a_missing_tensor_is_named(folder: Path, tensors: dict[str, Tensor]) -> None:
    for name in (
        "encoder.encoder.layer.1.attention.attention.key.weight",
        "decoder.transformer.h.0.ln_cross_attn.bias",
        "enc_to_dec_proj.weight",
        "decoder.transformer.wte.weight",
    ):
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, folder / SAFE)
        with pytest.raises(WeightsError, match=re.escape(f"has no tensor {name!r}")):
            load(folder)


def test_tensors_left_over_are_named(folder: Path, tensors: dict[str, Tensor]) -> None:
    extra = {"decoder.transformer.h.2.ln_1.weight": torch.zeros(48), "lora.up": torch.zeros(1)}
    save_file({**tensors, **extra}, folder / SAFE)
    with pytest.raises(
        WeightsError, match=r"2 tensors that no region uses: decoder\.transformer\.h\.2\.ln_1\.weight, lora\.up"
    ):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "encoder.embeddings.position_embeddings",
        "encoder.embeddings.patch_embeddings.projection.weight",
        "encoder.encoder.layer.0.attention.attention.value.bias",
        "decoder.transformer.wpe.weight",
        "decoder.transformer.h.1.crossattention.c_attn.weight",
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(
    folder: Path, tensors: dict[str, Tensor], name: str
) -> None:
    shape = tuple(tensors[name].shape)
    wrong = (*shape[:-1], shape[-1] + 1)
    save_file({**tensors, name: torch.zeros(wrong)}, folder / SAFE)
    says = f"has shape {wrong}, config.json implies {shape}"
    with pytest.raises(WeightsError, match=rf"tensor '[\w.]+' {re.escape(says)}"):
        load(folder)


def test_a_tied_head_is_the_embedding_itself(saved: Path, folder: Path, tensors: dict[str, Tensor]) -> None:
    weights = load(saved)
    assert weights.sets["decoder_after"][0][-1] is weights.sets["decoder_before"][0][0]
    # Some files hold the tied head a second time; it is not loaded twice.
    save_file(
        {**tensors, "decoder.lm_head.weight": tensors["decoder.transformer.wte.weight"].clone()}, folder / SAFE
    )
    again = load(folder)
    assert_equal(again, weights)
    assert weight_bytes(again) == weight_bytes(weights) == sum(t.nbytes for t in tensors_of(weights)) - 97 * 48 * 4


def test_a_head_that_differs_is_its_own_whatever_the_config_says(
    model: Any, saved: Path, folder: Path, tensors: dict[str, Tensor]
) -> None:
    head = torch.ones(97, 48)
    save_file({**tensors, "decoder.lm_head.weight": head}, folder / SAFE, metadata={"format": "pt"})
    assert torch.equal(load(folder).sets["decoder_after"][0][-1], head)
    reference = type(model).from_pretrained(folder)
    assert torch.equal(reference.decoder.lm_head.weight, head)


def test_an_untied_head_is_its_own_and_must_be_there(make_captioner: Callable[..., Any], tmp_path: Path) -> None:
    model = make_captioner({}, {"tie_word_embeddings": False})
    model.save_pretrained(tmp_path)
    weights = load(tmp_path)
    head, embedding = weights.sets["decoder_after"][0][-1], weights.sets["decoder_before"][0][0]
    assert torch.equal(head, model.decoder.lm_head.weight)
    assert not torch.equal(head, embedding)
    tensors = load_file(tmp_path / SAFE)
    del tensors["decoder.lm_head.weight"]
    save_file(tensors, tmp_path / SAFE)
    with pytest.raises(WeightsError, match=r"no decoder\.lm_head\.weight, and tie_word_embeddings is false"):
        load(tmp_path)


def test_what_many_rows_go_through_lies_turned_around_for_a_cpu_in_fp32(saved: Path) -> None:
    """The CPU library reads it from one end to the other. What one row a request goes through lies as it did."""
    sets = load(saved).sets
    encoders = [*sets["encoder_block"], sets["encoder_before"][0][3:4], sets["encoder_after"][0]]
    turned = [tensor for layer in encoders for tensor in layer if tensor.dim() == 2]
    assert len(turned) == 4 * len(sets["encoder_block"]) + 3  # patches, cross-attention, what it reads through
    assert all(tensor.t().is_contiguous() and not tensor.is_contiguous() for tensor in turned)
    decoders = (*sets["decoder_before"], *sets["decoder_block"], *sets["decoder_after"])
    assert all(tensor.is_contiguous() for layer in decoders for tensor in layer)


def test_weights_are_converted_to_the_dtype_but_for_the_normalisation(saved: Path) -> None:
    weights = load(saved, torch.bfloat16).sets
    kinds = {tensor.dtype for tensor in weights["encoder_before"][0][3:]}
    kinds |= {t.dtype for name in weights if name != "encoder_before" for layer in weights[name] for t in layer}
    assert kinds == {torch.bfloat16}
    assert {tensor.dtype for tensor in weights["encoder_before"][0][:3]} == {torch.float32}
    assert all(tensor.is_contiguous() for layers in weights.values() for layer in layers for tensor in layer)


def region(
    hidden: Tensor,
    /,
    first: Tensor,
    second: Tensor,
    third: Tensor | None = None,
    fourth: Tensor | None = None,
    *,
    eps: float = 0.0,
) -> Tensor:
    """A region with two weights that a checkpoint may lack."""
    return hidden


@takes_weights_of(region, "left", "right")
def twice(hidden: Tensor, *weights: Tensor) -> Tensor:
    return hidden


def test_weights_are_in_the_order_of_the_regions_signature() -> None:
    one, two, three, four = torch.arange(4.0)
    assert in_order(region, {"second": two, "first": one}) == (one, two)
    assert in_order(region, {"third": three, "second": two, "first": one}) == (one, two, three)
    assert [takes(region, count) for count in range(6)] == [False, False, True, True, True, False]
    for wrong in (
        {"first": one},
        {"first": one, "second": two, "other": three},
        {"first": one, "second": two, "fourth": four},  # would be taken for the third
    ):
        with pytest.raises(TypeError, match="are not the weights"):
            in_order(region, wrong)
    assert [*weight_names(twice)][:5] == ["left_first", "left_second", "left_third", "left_fourth", "right_first"]
