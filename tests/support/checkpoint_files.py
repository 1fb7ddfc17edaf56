"""What tests of checkpoints' sources write and find."""

from pathlib import Path

SAFE = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}
