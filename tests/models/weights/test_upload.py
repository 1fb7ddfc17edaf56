"""A checkpoint's tensors on their way to a device: every byte arrives, and nothing is left behind on the host."""

from pathlib import Path

import pytest
import torch
from support.checkpoints import random_captioners
from support.checkpoints.random_pairs import PAIRS
from support.parity.parity import NORMALISATION

from snapcap.models.config import ModelConfig
from snapcap.models.weights.load import load_weights
from snapcap.models.weights.read import batched, fill, pieces, upload

CHUNK = 64


def test_pieces_in_batches_bring_every_byte_and_fit_a_chunk() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 0, 63, 64, 65, 200, 7, 7, 7)
    sources = [torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8) for size in sizes]
    targets = [torch.zeros_like(source) for source in sources]
    batches = list(batched(pieces(zip(sources, targets, strict=True), CHUNK), CHUNK))
    assert max(sum(len(source) for source, _ in batch) for batch in batches) <= CHUNK
    assert len(batches) < sum(-(-size // CHUNK) for size in sizes), "small tensors share a chunk"
    chunk = torch.empty(CHUNK, dtype=torch.uint8)
    for batch in batches:
        for staged, target in fill(chunk, batch):
            assert staged.untyped_storage().data_ptr() == chunk.untyped_storage().data_ptr()
            target.copy_(staged)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)


def test_on_a_cpu_tensors_stay_in_the_files_pages() -> None:
    tensor = torch.arange(6).reshape(2, 3)
    assert upload({"a": tensor}, torch.device("cpu"))["a"].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("pair", [*PAIRS, "blip", "git"])
def test_every_familys_weights_are_made_on_the_device(pair: str, tmp_path: Path) -> None:
    """A meta tensor refuses to be joined with one of the host, as a tensor on a GPU does."""
    alone = {"blip": random_captioners.blip, "git": random_captioners.git}
    model = alone[pair]() if pair in alone else random_captioners.pair(*PAIRS[pair]())
    model.save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    on = {
        name: load_weights(tmp_path, config, NORMALISATION, torch.device(name), torch.bfloat16)
        for name in ("cpu", "meta")
    }
    for region, layers in on["cpu"].sets.items():
        for ours, theirs in zip(on["meta"].sets[region], layers, strict=True):
            assert all(weight.is_meta for weight in ours)
            assert [(w.shape, w.dtype) for w in ours] == [(w.shape, w.dtype) for w in theirs]
