"""The checkpoints of random weights: what transformers and snapcap make of them."""

import hashlib
import json
import random
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from snapcap.benchmarks.harness.random_checkpoint import RANDOM_MODELS, RandomModel, write_checkpoint
from snapcap.benchmarks.harness.workload import MODELS, NEW_TOKENS
from snapcap.models.config import ModelConfig
from snapcap.models.processing.tokenizer import Tokenizer

VIT = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 96}
BERT = {**VIT, "vocab_size": 600, "max_position_embeddings": 64}
# An instruction takes as many positions as it has letters.
LLAMA = {
    **VIT,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 600,
    "max_position_embeddings": 256,
}
QWEN_VISION = {"depth": 2, "hidden_size": 48, "num_heads": 3, "intermediate_size": 96}
QWEN_VISION |= {"num_position_embeddings": 49, "deepstack_visual_indexes": [0]}
GPT2 = {"vocab_size": 600, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 3, "n_inner": 96}
DAVIT = {
    "embed_dim": (16, 24, 32, 48),
    "depths": (1, 1, 2, 1),
    "num_heads": (2, 2, 2, 3),
    "num_groups": (2, 2, 2, 3),
}
BART = {
    "vocab_size": 600,
    "d_model": 48,
    "max_position_embeddings": 64,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 3),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
}
SIDES = {"florence2-base": 96}  # whose last stage has a token for 32 × 32 pixels
TINY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vit-b16-gpt2": (VIT, GPT2),
    "blip-base": (VIT, {**BERT, "encoder_hidden_size": 48}),
    "git-base": (VIT, BERT),
    "florence2-base": (DAVIT, BART),
    "smolvlm-256m": ({**VIT, "patch_size": 16, "scale_factor": 1}, LLAMA),
    "llava-llama3-8b": ({**VIT, "patch_size": 16}, LLAMA),
    "qwen3-vl-2b": (QWEN_VISION, {**LLAMA, "head_dim": 16, "max_position_embeddings": 1024}),
}


def tiny_model(name: str) -> RandomModel:
    vision, text = TINY[name]
    side = {} if name == "qwen3-vl-2b" else {"image_size": SIDES.get(name, 32)}
    return replace(RANDOM_MODELS[name], vision={**vision, **side}, text=text, dtype="float32")


@pytest.fixture(scope="module", params=RANDOM_MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tiny(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "tiny"
    write_checkpoint(tiny_model(name), folder)
    return folder


def transformers_model(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model as transformers loads it, and what it has to say of the weights it looked for."""
    import transformers

    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    model_class = getattr(transformers, architecture)
    model, information = model_class.from_pretrained(folder, output_loading_info=True)
    return model, information


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("vit-b16-gpt2", 239),
        ("blip-base", 224),
        ("git-base", 177),
        ("smolvlm-256m", 256),
        ("florence2-base", 232),
        ("llava-llama3-8b", 8465),
        ("qwen3-vl-2b", 2128),
    ],
)
def test_the_real_shapes_have_the_parameters_they_are_quoted_with(name: str, millions: int) -> None:
    with torch.device("meta"):
        model = RANDOM_MODELS[name].describe().model()
    tensors = [*model.named_parameters(), *model.named_buffers()]  # Florence-2's table of frames is a buffer
    # transformers' ViT has a pooler, which no captioner uses.
    count = sum(tensor.numel() for key, tensor in tensors if ".pooler." not in key)
    assert round(count / 1e6) == millions


def test_the_options_name_every_model() -> None:
    assert list(MODELS[1:]) == list(RANDOM_MODELS)


def test_transformers_finds_every_weight_and_only_those(tiny: Path) -> None:
    _, information = transformers_model(tiny)
    assert not any(information.values()), information


def test_a_seed_gives_the_same_files(name: str, tiny: Path, tmp_path: Path) -> None:
    write_checkpoint(tiny_model(name), tmp_path / "again")
    for file in sorted(tiny.iterdir()):
        again = (tmp_path / "again" / file.name).read_bytes()
        assert hashlib.sha256(again).digest() == hashlib.sha256(file.read_bytes()).digest(), file.name


def test_a_caption_has_twenty_tokens_at_most(name: str, tiny: Path) -> None:
    generation = ModelConfig.from_folder(tiny).generation
    assert generation.max_length == NEW_TOKENS + 1 == 21


def test_the_tokenizer_has_the_whole_vocabulary_and_reads_what_it_writes(name: str, tiny: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny)
    assert tokenizer.vocab_size == TINY[name][1]["vocab_size"]
    chooser = random.Random(0)
    text = "2 cats, über " + "".join(chooser.choices(string.ascii_letters, k=60))
    ids = tokenizer.encode(text)
    expected = (
        text
        if name in ("vit-b16-gpt2", "smolvlm-256m", "florence2-base", "llava-llama3-8b", "qwen3-vl-2b")
        else text.lower().replace("ü", "u")
    )
    assert tokenizer.decode(ids) == expected
    assert len(ids) < len(text.encode())  # some tokens are longer than a letter


def test_transformers_and_snapcap_caption_alike(tiny: Path, samples: dict[Path, str], tmp_path: Path) -> None:
    from snapcap import Captioner as Snapcap
    from snapcap.benchmarks.peers.transformers_server import Captioner, decode

    images = list(samples)[:2]
    captioner = Captioner(str(tiny), "cpu")
    expected = captioner.captions([decode(image.read_bytes()) for image in images])
    assert [reply["tokens"] for reply in expected] == [NEW_TOKENS] * 2
    with Snapcap(tiny, backend="eager", buckets=(1, 2), cache_dir=tmp_path) as ours:
        assert [str(caption) for caption in ours.batch(images)] == [reply["caption"] for reply in expected]


def test_captions_of_random_weights_are_not_one_token_repeated(name: str, tiny: Path) -> None:
    from snapcap.benchmarks.peers.transformers_server import Captioner

    captioner = Captioner(str(tiny), "cpu")
    torch.manual_seed(0)
    side = SIDES.get(name, 32)
    images = {"pixel_values": torch.randn(2, 3, side, side)}
    if name == "qwen3-vl-2b":
        images = {
            "pixel_values": torch.randn(2 * 16, 3 * 2 * 16 * 16),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        }
    if name == "smolvlm-256m":  # with a tile of each
        images = {"pixel_values": images["pixel_values"].unsqueeze(1)}
    first, second = (reply["caption"] for reply in captioner.generate(images))
    assert first != second
    assert min(len(set(first)), len(set(second))) > 6, "several words or letters"
