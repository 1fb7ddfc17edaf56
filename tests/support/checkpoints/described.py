"""Writes checkpoints of real shapes whose weights are holes in a file: to be described, not to be computed with."""

import json
import math
import struct
from pathlib import Path

from snapcap.benchmarks.harness.random_checkpoint import RANDOM_MODELS

_TYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}


def write_described(name: str, folder: Path) -> Path:
    """A bench model's folder, which takes a few MB of disk."""
    model = RANDOM_MODELS[name]
    files = model.family.files(model.shapes)
    folder.mkdir(parents=True)
    for file, content in files.small.items():
        (folder / file).write_text(json.dumps(content))
    (folder / "tokenizer.json").write_text(json.dumps(files.tokenizer))
    dtype, item = _TYPES[model.shapes.dtype]
    header, end = {}, 0
    for tensor in model.tensors:
        begin, end = end, end + math.prod(tensor.shape) * item
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + end)
    return folder
