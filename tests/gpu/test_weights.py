"""Weights on a GPU are those of a CPU, bit for bit, of every family."""

from pathlib import Path

import pytest
import torch
from support.checkpoints import random_captioners
from support.checkpoints.random_pairs import PAIRS
from support.parity.parity import NORMALISATION

from snapcap.models.config import ModelConfig
from snapcap.models.weights.load import load_weights

SOME = (
    "vit and bert",
    "deit and gpt2",
    "wider vit and roberta with an own head",
    "beit with both, and both kinds of norm",
    "trocr large",
    "trocr of an odd width",
    "blip",
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("pair", SOME)
def test_weights_equal_those_of_a_cpu(pair: str, dtype: torch.dtype, device: torch.device, tmp_path: Path) -> None:
    if pair == "blip":
        model = random_captioners.blip(text={"vocab_size": 24000})  # more than a chunk of embeddings
    else:
        model = random_captioners.pair(*PAIRS[pair]())
    model.save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    wanted = load_weights(tmp_path, config, NORMALISATION, torch.device("cpu"), dtype)
    found = load_weights(tmp_path, config, NORMALISATION, device, dtype)
    for region, layers in wanted.sets.items():
        for ours, theirs in zip(found.sets[region], layers, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert one.device == device
                assert device.type == "cpu" or one.data_ptr() % 16 == 0
                assert torch.equal(one.cpu(), other), region
