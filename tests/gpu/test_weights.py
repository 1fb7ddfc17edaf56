"""Weights on a GPU are those of a CPU, bit for bit, of every family; and so are those that were prepared for it."""

from pathlib import Path

import pytest
import torch
from support.checkpoints import random_captioners
from support.checkpoints.chat_files import write_chat_files
from support.checkpoints.prepared import write_prepared
from support.checkpoints.qwen3_vl_files import qwen3_vl, write_files
from support.checkpoints.random_pairs import PAIRS
from support.parity.parity import NORMALISATION, weight_bytes

from snapcap.models.config import ModelConfig
from snapcap.models.weights.load import load_weights, prepared_weights
from snapcap.models.weights.prepared import map_weights

SOME = (
    "vit and bert",
    "deit and gpt2",
    "wider vit and roberta with an own head",
    "beit with both, and both kinds of norm",
    "trocr large",
    "trocr of an odd width",
    "blip",
    "git",
    "smolvlm",
    "florence2",
    "qwen3-vl",
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("pair", SOME)
def test_weights_equal_those_of_a_cpu(pair: str, dtype: torch.dtype, device: torch.device, tmp_path: Path) -> None:
    if pair in ("git", "florence2"):
        model = getattr(random_captioners, pair)()
    elif pair == "smolvlm":
        model = random_captioners.smolvlm()
        write_chat_files(tmp_path)
    elif pair == "qwen3-vl":
        model = qwen3_vl()
        write_files(tmp_path)
    elif pair == "blip":
        model = random_captioners.blip(text={"vocab_size": 24000})  # more than a chunk of embeddings
    else:
        model = random_captioners.pair(*PAIRS[pair]())
    model.save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    cpu = torch.device("cpu")
    wanted = load_weights(tmp_path, config, NORMALISATION, cpu, dtype)
    found = load_weights(tmp_path, config, NORMALISATION, device, dtype)
    path = tmp_path / "prepared"
    write_prepared(path, load_weights(tmp_path, config, NORMALISATION, cpu, dtype, device.type), "key")
    with path.open("rb") as file:
        prepared = prepared_weights(map_weights(file, "key"), device)
    for region, layers in wanted.sets.items():
        for ours, mapped, theirs in zip(found.sets[region], prepared.sets[region], layers, strict=True):
            for one, another, other in zip(ours, mapped, theirs, strict=True):
                assert one.device == another.device == device
                assert device.type == "cpu" or one.data_ptr() % 16 == another.data_ptr() % 256 == 0
                assert one.stride() == another.stride()
                assert torch.equal(one.cpu(), other), region
                assert torch.equal(another.cpu(), other), region
    assert weight_bytes(prepared) == weight_bytes(found)
