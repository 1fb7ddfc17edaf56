"""Tensors' names in files of every family: tied ones under either name, within wrappers, twice, in messages."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model
from support.checkpoints import random_captioners
from support.checkpoints.random_captioners import TEXT, VISION
from support.parity.parity import NORMALISATION
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.errors import WeightsError
from snapcap.models.names import ties
from snapcap.models.regions.table import Weights
from snapcap.models.text import ChatIds
from snapcap.models.weights.load import load_weights

SAFE = "model.safetensors"
DECODES = {"is_decoder": True, "add_cross_attention": True}
GPT2 = {"vocab_size": 97, "n_positions": 64, "n_embd": 48, "n_layer": 1, "n_head": 3, "add_cross_attention": True}
TROCR = {"vocab_size": 97, "d_model": 48, "decoder_layers": 1, "decoder_attention_heads": 3, "decoder_ffn_dim": 80}


def pair(decoder: Any) -> Any:
    return random_captioners.pair(transformers.ViTConfig(**VISION), decoder)


TIED: dict[str, Callable[[], Any]] = {
    "blip": random_captioners.blip,
    "git": lambda: random_captioners.git(text={"tie_word_embeddings": True}),
    "gpt2": lambda: pair(transformers.GPT2Config(**GPT2)),
    "bert": lambda: pair(transformers.BertConfig(**TEXT, **DECODES)),
    "roberta": lambda: pair(transformers.RobertaConfig(**TEXT, **DECODES)),
    "trocr": lambda: pair(transformers.TrOCRConfig(**TROCR)),
    "florence2": random_captioners.florence2,
    "smolvlm": lambda: random_captioners.smolvlm(tie_word_embeddings=True),
    "llava": lambda: random_captioners.llava("Siglip", tie_word_embeddings=True),
}


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.from_folder(folder, lambda *_: ChatIds((5, 6), 3, (4,), "", "", (7,)))


def load(folder: Path) -> Weights[Tensor]:
    return load_weights(folder, config_of(folder), NORMALISATION, torch.device("cpu"), torch.float32)


def assert_equal(first: Weights[Tensor], second: Weights[Tensor]) -> None:
    assert first.sets.keys() == second.sets.keys()
    for name, layers in first.sets.items():
        for one, other in zip(layers, second.sets[name], strict=True):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True)), name


@pytest.fixture(scope="module", params=TIED)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The model, and the folder that `save_pretrained` wrote."""
    model, folder = TIED[request.param](), tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture
def other(saved: tuple[Any, Path], tmp_path: Path) -> Path:
    """The same without its weights."""
    for file in saved[1].glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def test_what_save_model_writes_is_read(saved: tuple[Any, Path], other: Path) -> None:
    """It stores a tied tensor once, under the name that comes first in the alphabet."""
    model, folder = saved
    save_model(model, str(other / SAFE))
    assert_equal(load(other), load(folder))


def test_tied_tensors_are_found_under_each_of_their_names(saved: tuple[Any, Path], other: Path) -> None:
    model, folder = saved
    state, wanted = model.state_dict(), load(folder)
    known = config_of(folder).names.canonical(state)
    there = {names for names in ties(tied_head=True) if len(set(names) & set(known.values())) > 1}
    assert there
    for names in there:
        theirs = {ours: name for name, ours in known.items() if ours in names}
        kept_once = {name: tensor for name, tensor in state.items() if name not in theirs.values()}
        for name in theirs.values():
            save_file(copied({**kept_once, name: state[name]}), other / SAFE)
            assert_equal(load(other), wanted)
        save_file(copied(kept_once), other / SAFE)
        with pytest.raises(WeightsError, match="no tensor") as refusal:
            load(other)
        assert any(f"{name!r}" in str(refusal.value) for name in theirs.values())


def test_an_embedding_that_differs_from_the_shared_one_is_used_in_its_place(tmp_path: Path) -> None:
    """As in transformers, which ties what is equal."""
    model = random_captioners.florence2()
    model.save_pretrained(tmp_path)
    names = ("model.language_model.encoder.embed_tokens.weight", "model.language_model.decoder.embed_tokens.weight")
    encoder, decoder = torch.ones(97, 40), torch.zeros(97, 40)
    changed = {**load_file(tmp_path / SAFE), names[0]: encoder, names[1]: decoder}
    save_file(changed, tmp_path / SAFE, metadata={"format": "pt"})
    found = load(tmp_path).sets
    reference = type(model).from_pretrained(tmp_path).state_dict()
    assert torch.equal(found["prefix_before"][0][4], reference[names[0]])
    assert torch.equal(found["decoder_before"][0][0], reference[names[1]])
    assert torch.equal(found["decoder_after"][0][0], reference["lm_head.weight"])
    assert not torch.equal(reference["lm_head.weight"], decoder)


def test_every_missing_tensor_is_said_by_the_checkpoints_name(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    names = config_of(folder).names
    stored = load_file(folder / SAFE)
    for state in (stored, model.state_dict(), [f"module.{name}" for name in stored]):
        known = names.canonical(state)
        for name, ours in known.items():
            assert names.original(ours, [other for other in state if other != name]) == name


WRAPPERS: dict[str, Callable[[str], str]] = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "torch.compile of a part": lambda name: re.sub(r"^(\w+)\.", r"\1._orig_mod.", name),
    "DistributedDataParallel": lambda name: f"module.{name}",
    "both": lambda name: f"_orig_mod.module.{name}",
    "PEFT": lambda name: f"base_model.model.{name}",
    "FSDP of a part": lambda name: re.sub(r"^(\w+)\.", r"_fsdp_wrapped_module.\1._fsdp_wrapped_module.", name),
    "TensorFlow's norms": lambda name: re.sub(
        r"LayerNorm\.(weight|bias)", lambda m: f"LayerNorm.{'gamma' if m[1] == 'weight' else 'beta'}", name
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_wraps_a_module_is_no_part_of_a_name(saved: tuple[Any, Path], other: Path, wrapper: str) -> None:
    _, folder = saved
    tensors = load_file(folder / SAFE)
    renamed = {WRAPPERS[wrapper](name): tensor for name, tensor in tensors.items()}
    save_file(renamed, other / SAFE)
    assert_equal(load(other), load(folder))
    wrong = next(name for name in renamed if name.endswith(("bias", "beta", "weight")))
    save_file({**renamed, wrong: torch.zeros(2, 2, 2)}, other / SAFE)
    with pytest.raises(WeightsError, match=re.escape(f"{wrong!r} has shape")):
        load(other)


def test_a_tensor_under_two_names_is_one_where_both_are_equal(saved: tuple[Any, Path], other: Path) -> None:
    _, folder = saved
    tensors = load_file(folder / SAFE)
    name, tensor = next((name, tensor) for name, tensor in tensors.items() if name.endswith(".bias"))
    save_file({**tensors, f"module.{name}": tensor.clone()}, other / SAFE)
    assert_equal(load(other), load(folder))
    save_file({**tensors, f"module.{name}": tensor + 1}, other / SAFE)
    with pytest.raises(WeightsError, match="which are one tensor, and they differ") as refusal:
        load(other)
    assert all(f"{each!r}" in str(refusal.value) for each in (name, f"module.{name}"))


def test_an_adapter_within_a_model_is_refused(saved: tuple[Any, Path], other: Path) -> None:
    """As the state of a PEFT model has it."""
    wrapped = {f"base_model.model.{name}": tensor for name, tensor in load_file(saved[1] / SAFE).items()}
    name = next(name for name in wrapped if name.endswith(".weight"))
    adapted = name.replace(".weight", ".base_layer.weight")
    rank = {name.replace(".weight", ".lora_A.default.weight"): torch.zeros(4, 48)}
    save_file({**{n: t for n, t in wrapped.items() if n != name}, adapted: wrapped[name], **rank}, other / SAFE)
    with pytest.raises(WeightsError, match=r"tensors of a PEFT adapter, .*after merge_and_unload\(\)"):
        load(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64])
def test_floating_point_tensors_are_converted_and_others_refused(
    saved: tuple[Any, Path], other: Path, dtype: torch.dtype
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(saved[1] / SAFE).items()}
    save_file(tensors, other / SAFE)
    if not dtype.is_floating_point:
        with pytest.raises(
            WeightsError, match=rf"' is {str(dtype)[6:]}; quantized weights are not read"
        ) as refusal:
            load(other)
        assert any(f"{name!r}" in str(refusal.value) for name in tensors)
        return
    found = load(other)
    save_file({name: tensor.float() for name, tensor in tensors.items()}, other / SAFE)
    assert_equal(found, load(other))


def test_a_quantized_checkpoint_is_refused_before_a_tensor_is_read(saved: tuple[Any, Path], other: Path) -> None:
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"unsupported quantization_config = .*quantized weights are not read"):
        config_of(other)
