"""The checkpoint of random weights: what transformers and snapcap make of it."""

import hashlib
import json
import math
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from support.server_process import snapcap

from benchmarks.random_checkpoint import SHAPES, Shapes, tensor_shapes, write_checkpoint
from models.config import ModelConfig
from models.tokenizer import Tokenizer

TINY = Shapes(
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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "tiny"
    write_checkpoint(TINY, folder)
    return folder


def test_the_real_shapes_have_the_parameters_they_are_quoted_with() -> None:
    count = sum(math.prod(shape) for _, shape in tensor_shapes(SHAPES["vit-b16-gpt2"]))
    assert round(count / 1e6) == 239


def test_a_seed_gives_the_same_files(tiny: Path, tmp_path: Path) -> None:
    write_checkpoint(TINY, tmp_path / "again")
    for file in sorted(tiny.iterdir()):
        again = (tmp_path / "again" / file.name).read_bytes()
        assert hashlib.sha256(again).digest() == hashlib.sha256(file.read_bytes()).digest(), file.name


def test_no_token_ends_a_caption(tiny: Path) -> None:
    generation = ModelConfig.from_folder(tiny).generation
    assert (generation.eos_ids, generation.max_length) == ((), TINY.new_tokens + 1)


def test_the_tokenizer_has_the_whole_vocabulary_and_reads_what_it_writes(tiny: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny)
    assert tokenizer.vocab_size == TINY.vocab_size
    chooser = random.Random(0)
    text = "2 cats, über " + "".join(chooser.choices(string.ascii_letters, k=400))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())  # some merges apply


def test_transformers_and_snapcap_caption_alike(tiny: Path, samples: dict[Path, str]) -> None:
    from benchmarks.peers.transformers_model import Captioner

    images = list(samples)[:2]
    captioner = Captioner(str(tiny), "cpu", compiled=False)
    expected = captioner.generate(captioner.pixels([image.read_bytes() for image in images]))
    assert [reply["tokens"] for reply in expected] == [TINY.new_tokens] * 2
    # In a process of its own: the command ends its process without ado.
    done = snapcap("caption", "--model", str(tiny), "--backend", "eager", *map(str, images))
    assert done.returncode == 0, done.stderr
    captions = [line.partition("\t")[2] for line in done.stdout.splitlines()]
    assert captions == [reply["caption"] for reply in expected]


def test_captions_of_random_weights_are_not_one_token_repeated(tiny: Path, samples: dict[Path, str]) -> None:
    from transformers import VisionEncoderDecoderModel

    model: Any = VisionEncoderDecoderModel.from_pretrained(tiny)
    torch.manual_seed(0)
    tokens = model.generate(torch.rand(1, 3, 32, 32), do_sample=False, num_beams=1)[0].tolist()
    assert len(set(tokens)) > 3, json.dumps(tokens)
