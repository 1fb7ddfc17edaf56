"""Writes checkpoints of real shapes whose weights are holes in a file: to be described, not to be computed with."""

import json
import struct
from pathlib import Path

import torch
from transformers.core_model_loading import revert_weight_conversion

from snapcap.benchmarks.harness.random_checkpoint import RANDOM_MODELS, write_files

_TYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}


def write_described(name: str, folder: Path) -> Path:
    """A bench model's folder, which takes a few MB of disk."""
    bench_model = RANDOM_MODELS[name]
    captioner = bench_model.describe()
    with torch.device("meta"):
        model = captioner.model()
    kept = {
        **dict(model.named_parameters()),
        **{key: each for key, each in model.named_buffers() if "pos_idx" in key},
    }
    tensors = revert_weight_conversion(model, kept)  # the names and shapes that `save_pretrained` writes
    folder.mkdir(parents=True)
    write_files(captioner, folder)
    dtype, item = _TYPES[bench_model.dtype]
    header, end = {}, 0
    for key, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * item
        header[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + end)
    return folder
