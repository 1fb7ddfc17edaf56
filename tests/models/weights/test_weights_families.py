"""Checkpoint files of BLIP, GIT and pairs: every layout gives equal weights, and what does not fit is named."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.checkpoints import random_captioners
from support.checkpoints.random_captioners import TEXT, VISION
from support.parity.parity import NORMALISATION
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.errors import WeightsError
from snapcap.models.layers.beit import relative_index
from snapcap.models.layers.bert import sinusoids
from snapcap.models.regions.table import Weights
from snapcap.models.weights.load import load_weights

SAFE, BIN = "model.safetensors", "pytorch_model.bin"
DECODES = {"is_decoder": True, "add_cross_attention": True}
VIT = transformers.ViTConfig(**VISION)
MODELS: dict[str, Callable[[], Any]] = {
    "blip": random_captioners.blip,
    "git": lambda: random_captioners.git(text={"tie_word_embeddings": True}),
    "bert": lambda: random_captioners.pair(VIT, transformers.BertConfig(**TEXT, **DECODES)),
    "roberta": lambda: random_captioners.pair(VIT, transformers.RobertaConfig(**TEXT, **DECODES)),
    "trocr": lambda: random_captioners.pair(
        transformers.DeiTConfig(**VISION),
        transformers.TrOCRConfig(
            vocab_size=97, d_model=48, decoder_layers=2, decoder_attention_heads=3, decoder_ffn_dim=80
        ),
    ),
    "beit": lambda: random_captioners.pair(
        transformers.BeitConfig(**VISION, use_relative_position_bias=True),
        transformers.BertConfig(**TEXT, **DECODES),
    ),
    "beit with a shared bias": lambda: random_captioners.pair(
        transformers.BeitConfig(**VISION, use_shared_relative_position_bias=True),
        transformers.BertConfig(**TEXT, **DECODES),
    ),
}
# What older versions of transformers saved beside the parameters.
BUFFERS: dict[str, dict[str, Tensor]] = {
    "blip": {"text_decoder.bert.embeddings.position_ids": torch.arange(64).unsqueeze(0)},
    "git": {
        "git.embeddings.position_ids": torch.arange(64).unsqueeze(0),
        "git.image_encoder.vision_model.embeddings.position_ids": torch.arange(37).unsqueeze(0),
    },
    "bert": {
        "decoder.bert.embeddings.position_ids": torch.arange(64).unsqueeze(0),
        "decoder.bert.pooler.dense.weight": torch.zeros(48, 48),
        "encoder.embeddings.mask_token": torch.zeros(1, 1, 48),
    },
    "roberta": {
        "decoder.roberta.embeddings.position_ids": torch.arange(64).unsqueeze(0),
        "decoder.roberta.embeddings.token_type_ids": torch.zeros(1, 64, dtype=torch.int64),
    },
    "trocr": {"decoder.model.decoder.embed_positions._float_tensor": torch.zeros(1)},
    "beit": {
        f"encoder.encoder.layer.{layer}.attention.attention.relative_position_bias.relative_position_index":
            torch.zeros(37, 37, dtype=torch.int64)
        for layer in range(2)
    },
    "beit with a shared bias": {
        "encoder.encoder.relative_position_bias.relative_position_index": torch.zeros(37, 37, dtype=torch.int64)
    },
}  # fmt: skip


def load(folder: Path) -> Weights:
    config = ModelConfig.from_folder(folder)
    return load_weights(folder, config, NORMALISATION, torch.device("cpu"), torch.float32)


def assert_equal(first: Weights, second: Weights) -> None:
    assert first.sets.keys() == second.sets.keys()
    for name, layers in first.sets.items():
        for one, other in zip(layers, second.sets[name], strict=True):
            assert len(one) == len(other)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any, Path]:
    """Its name, the model, and the folder that `save_pretrained` wrote."""
    model = MODELS[request.param]()
    model.save_pretrained(tmp_path / "saved")
    return request.param, model, tmp_path / "saved"


def without_weights(folder: Path) -> Path:
    other = folder.with_name("other")
    other.mkdir()
    for name in ("config.json", "generation_config.json"):
        (other / name).write_bytes((folder / name).read_bytes())
    return other


def test_a_state_dict_with_its_tied_copies_gives_equal_weights(saved: tuple[str, Any, Path]) -> None:
    """transformers 5's own module names, which for ViT and its kin are not those of its files."""
    _, model, folder = saved
    other = without_weights(folder)
    torch.save(model.state_dict(), other / BIN)
    assert_equal(load(other), load(folder))
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, other / SAFE)
    (other / BIN).unlink()
    again = load(other)
    assert_equal(again, load(folder))
    head, token = again.sets["decoder_after"][0], again.sets["decoder_before"][0][0]
    assert any(tensor is token for tensor in head), "a copy of the embedding is not loaded as a head"


def test_buffers_of_older_versions_are_ignored(saved: tuple[str, Any, Path]) -> None:
    name, _, folder = saved
    other = without_weights(folder)
    save_file({**load_file(folder / SAFE), **BUFFERS[name]}, other / SAFE)
    assert_equal(load(other), load(folder))


def test_every_tensor_is_asked_for_by_name_and_shape(saved: tuple[str, Any, Path]) -> None:
    _, _, folder = saved
    other = without_weights(folder)
    tensors = load_file(folder / SAFE)
    for name in ModelConfig.from_folder(folder).names.canonical(tensors):
        if ".1." in name:  # the second layer, which is read as the first
            continue
        save_file({known: tensor for known, tensor in tensors.items() if known != name}, other / SAFE)
        with pytest.raises(WeightsError, match=rf"no tensor '{re.escape(name)}'"):
            load(other)
        wrong = torch.zeros(*tensors[name].shape, 2)
        save_file({**tensors, name: wrong}, other / SAFE)
        with pytest.raises(WeightsError, match=rf"'{re.escape(name)}' has shape .* config\.json implies"):
            load(other)
    save_file({**tensors, "text_encoder.x": torch.zeros(1)}, other / SAFE)
    with pytest.raises(WeightsError, match=r"1 tensors that no region uses: text_encoder\.x"):
        load(other)


def test_a_head_of_its_own_must_be_there(tmp_path: Path) -> None:
    decoder = transformers.BertConfig(**TEXT, **DECODES, tie_word_embeddings=False)
    model = random_captioners.pair(VIT, decoder)
    model.save_pretrained(tmp_path)
    head, bias, *_ = load(tmp_path).sets["decoder_after"][0]
    assert torch.equal(head, model.decoder.cls.predictions.decoder.weight)
    assert torch.equal(bias, model.decoder.cls.predictions.decoder.bias)
    tensors = load_file(tmp_path / SAFE)
    del tensors["decoder.cls.predictions.decoder.weight"]
    save_file(tensors, tmp_path / SAFE)
    with pytest.raises(
        WeightsError, match=r"no decoder\.cls\.predictions\.decoder\.weight, and tie_word_embeddings is false"
    ):
        load(tmp_path)


@pytest.mark.parametrize(("top", "text"), [(True, True), (True, False), (False, True), (False, False)])
def test_either_configuration_of_blip_ties_the_head_as_in_transformers(
    tmp_path: Path, top: bool, text: bool
) -> None:
    config = transformers.BlipConfig(
        text_config=TEXT | {"bos_token_id": 95, "sep_token_id": 2, "tie_word_embeddings": text},
        vision_config=VISION,
        tie_word_embeddings=top,
    )
    model = transformers.BlipForConditionalGeneration(config)
    decoder = model.text_decoder
    tied = decoder.cls.predictions.decoder.weight is decoder.bert.embeddings.word_embeddings.weight
    model.save_pretrained(tmp_path)
    assert ModelConfig.from_folder(tmp_path).decoder.tied_head is tied
    weights = load(tmp_path).sets
    assert torch.equal(weights["decoder_after"][0][0], decoder.cls.predictions.decoder.weight)
    assert (weights["decoder_after"][0][0] is weights["decoder_before"][0][0]) is tied


def test_sinusoids_and_relative_positions_are_transformers() -> None:
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias
    from transformers.models.trocr.modeling_trocr import TrOCRSinusoidalPositionalEmbedding

    for width in (48, 51):
        expected = TrOCRSinusoidalPositionalEmbedding.get_embedding(70, width)
        torch.testing.assert_close(sinusoids(70, width), expected, rtol=0, atol=1e-6)
    for side in (1, 6, 14):
        expected = BeitRelativePositionBias.generate_relative_position_index((side, side))
        assert torch.equal(relative_index(side, side), expected)
