"""Paints training scenes in other processes while training runs, and keeps them on the device."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from snapcap.models.dataclass import dataclass
from snapcap.models.demo.training.drawing import paint
from snapcap.models.demo.training.scenes import scene_of

BLOCK = 256
IGNORED = -100  # label that the loss ignores


@dataclass(frozen=True)
class Block:
    """Painted scenes: uint8 pixels [BLOCK, 96, 96, 3] and their captions."""

    pixels: NDArray[np.uint8]
    captions: list[str]


def paint_block(number: int) -> Block:
    """Paints training scenes `number` × BLOCK and those that follow."""
    scenes = [scene_of("train", index) for index in range(number * BLOCK, (number + 1) * BLOCK)]
    return Block(np.stack([np.asarray(paint(scene)) for scene in scenes]), [scene.caption for scene in scenes])


@contextmanager
def painted_blocks(first: int, count: int, processes: int) -> Iterator[Iterator[Block]]:
    """Yields `count` blocks from number `first` on, as they get ready.

    Forks processes, so it must be called before CUDA is initialised.
    """
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield pool.imap_unordered(paint_block, range(first, first + count))


class SceneStore:
    """Holds all scenes painted so far. `batch` draws from them with replacement."""

    def __init__(self, capacity: int, image_size: int, tokens: int, device: str) -> None:
        self._pixels = torch.empty((capacity, image_size, image_size, 3), dtype=torch.uint8, device=device)
        self._labels = torch.empty((capacity, tokens), dtype=torch.int64, device=device)
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self.filled = 0

    def fill(self, blocks: Iterator[Block], tokenizer: PreTrainedTokenizerBase) -> None:
        """Takes in every block. Runs in a thread of its own, and the next `wait_for` raises its failure."""
        try:
            for block in blocks:
                end = self.filled + len(block.captions)
                self._pixels[self.filled : end] = torch.from_numpy(block.pixels).to(self._pixels.device)
                labels = labels_of(block.captions, tokenizer, self._labels.shape[1])
                self._labels[self.filled : end] = labels.to(self._labels.device)
                self._advance(end, None)
        except Exception as failure:
            self._advance(self.filled, failure)

    def wait_for(self, count: int) -> None:
        """Waits until `count` scenes are painted.

        Raises:
            RuntimeError: painting failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.filled >= count or self._failure is not None)
        if self._failure is not None:
            raise RuntimeError("painting the training scenes failed") from self._failure

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns normalised pixels, float32 [size, 3, H, W], and labels, int64 [size, tokens]."""
        chosen = torch.randint(self.filled, (size,), device=self._pixels.device)
        pixels = self._pixels[chosen].permute(0, 3, 1, 2).float()
        return pixels / 127.5 - 1, self._labels[chosen]

    def _advance(self, filled: int, failure: BaseException | None) -> None:
        with self._changed:
            self.filled, self._failure = filled, failure
            self._changed.notify_all()


def labels_of(captions: list[str], tokenizer: PreTrainedTokenizerBase, tokens: int) -> torch.Tensor:
    """Returns token ids with the end token, padded with IGNORED: int64 [captions, tokens]."""
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(captions)["input_ids"]]
    return torch.tensor([row + [IGNORED] * (tokens - len(row)) for row in rows])
