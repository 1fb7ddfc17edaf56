"""The checkpoints of random weights: what transformers and snapcap make of them."""

import hashlib
import json
import math
import random
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers.server_process import snapcap

from snapcap.benchmarks.harness.random_checkpoint import RANDOM_MODELS, RandomModel, write_checkpoint
from snapcap.benchmarks.random_models.chat import ChatShapes
from snapcap.benchmarks.random_models.florence2 import Florence2Shapes
from snapcap.models.config import ModelConfig
from snapcap.models.processing.tokenizer import Tokenizer


def tiny_model(name: str) -> RandomModel:
    model = RANDOM_MODELS[name]
    shapes = replace(
        model.shapes,
        image_size=32,
        width=48,
        heads=3,
        encoder_layers=2,
        decoder_layers=2,
        inner=96,
        vocab_size=600,
        positions=64,
        dtype="float32",
    )
    if isinstance(shapes, ChatShapes):  # an instruction takes as many positions as it has letters
        text = {"text_width": 48, "text_heads": 6, "kv_heads": 2, "text_inner": 96}
        shapes = replace(shapes, positions=256, pixel_shuffle=1, **text)
    if isinstance(shapes, Florence2Shapes):  # its last stage has a token for 32 × 32 pixels
        stages = {"widths": (16, 24, 32, 48), "depths": (1, 1, 2, 1), "stage_heads": (2, 2, 2, 3)}
        shapes = replace(shapes, image_size=96, **stages)
    return replace(model, shapes=shapes)


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
    ],
)
def test_the_real_shapes_have_the_parameters_they_are_quoted_with(name: str, millions: int) -> None:
    count = sum(math.prod(spec.shape) for spec in RANDOM_MODELS[name].tensors)
    assert round(count / 1e6) == millions


def test_blip_base_has_the_tensors_that_transformers_would_write() -> None:
    import transformers

    # Its defaults are the published configuration, but for the decoder's heads.
    config = transformers.BlipConfig(text_config={"num_attention_heads": 12})
    with torch.device("meta"):
        model = transformers.BlipForConditionalGeneration(config)
    theirs = {parameter_name: tuple(parameter.shape) for parameter_name, parameter in model.named_parameters()}
    assert {spec.name: spec.shape for spec in RANDOM_MODELS["blip-base"].tensors} == theirs


def test_git_base_has_the_tensors_that_transformers_would_write() -> None:
    import transformers

    with torch.device("meta"):  # its defaults are the published configuration
        model = transformers.GitForCausalLM(transformers.GitConfig(vision_config={}))
    theirs = {parameter_name: tuple(parameter.shape) for parameter_name, parameter in model.named_parameters()}
    assert {spec.name: spec.shape for spec in RANDOM_MODELS["git-base"].tensors} == theirs


def test_transformers_finds_every_weight_and_only_those(tiny: Path) -> None:
    _, information = transformers_model(tiny)
    # transformers' ViT has a pooler, which no captioner uses.
    missing = {key for key in information.pop("missing_keys") if ".pooler." not in key}
    assert not missing
    assert not any(information.values()), information


def test_a_seed_gives_the_same_files(name: str, tiny: Path, tmp_path: Path) -> None:
    write_checkpoint(tiny_model(name), tmp_path / "again")
    for file in sorted(tiny.iterdir()):
        again = (tmp_path / "again" / file.name).read_bytes()
        assert hashlib.sha256(again).digest() == hashlib.sha256(file.read_bytes()).digest(), file.name


def test_a_caption_has_twenty_tokens_at_most(name: str, tiny: Path) -> None:
    generation = ModelConfig.from_folder(tiny).generation
    assert generation.max_length == RANDOM_MODELS[name].shapes.new_tokens + 1 == 21


def test_the_tokenizer_has_the_whole_vocabulary_and_reads_what_it_writes(name: str, tiny: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny)
    assert tokenizer.vocab_size == tiny_model(name).shapes.vocab_size
    chooser = random.Random(0)
    text = "2 cats, über " + "".join(chooser.choices(string.ascii_letters, k=60))
    ids = tokenizer.encode(text)
    expected = (
        text
        if name in ("vit-b16-gpt2", "smolvlm-256m", "florence2-base", "llava-llama3-8b")
        else text.lower().replace("ü", "u")
    )
    assert tokenizer.decode(ids) == expected
    assert len(ids) < len(text.encode())  # some tokens are longer than a letter


def test_transformers_and_snapcap_caption_alike(name: str, tiny: Path, samples: dict[Path, str]) -> None:
    from snapcap.benchmarks.peers.transformers_model import Captioner

    images = list(samples)[:2]
    captioner = Captioner(str(tiny), "cpu", compiled=False)
    expected = captioner.generate(captioner.pixels([image.read_bytes() for image in images]))
    assert [reply["tokens"] for reply in expected] == [RANDOM_MODELS[name].shapes.new_tokens] * 2
    # In a process of its own: the command ends its process without ado.
    done = snapcap("caption", "--model", str(tiny), "--backend", "eager", *map(str, images))
    assert done.returncode == 0, done.stderr
    captions = [line.partition("\t")[2] for line in done.stdout.splitlines()]
    assert captions == [reply["caption"] for reply in expected]


def test_captions_of_random_weights_are_not_one_token_repeated(name: str, tiny: Path) -> None:
    from snapcap.benchmarks.peers.transformers_model import Captioner

    captioner = Captioner(str(tiny), "cpu", compiled=False)
    torch.manual_seed(0)
    side = tiny_model(name).shapes.image_size
    images = torch.randn(2, 3, side, side)
    if name == "smolvlm-256m":
        images = images.unsqueeze(1)  # a tile of each
    first, second = (reply["caption"] for reply in captioner.generate(images))
    assert first != second
    assert min(len(set(first)), len(set(second))) > 6, "several words or letters"
