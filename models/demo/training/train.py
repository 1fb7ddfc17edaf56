"""Trains the demo model and prints its exact match on held-out scenes.

    python -m snapcap.models.demo.training.train --out DIR

Other processes paint training scenes while the model trains on those that are there.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import time
from multiprocessing.pool import IMapIterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from snapcap.models.demo.training import build
from snapcap.models.demo.training.accuracy import Captioner, answers, report
from snapcap.models.demo.training.drawing import paint
from snapcap.models.demo.training.scenes import scene_of

BLOCKS, BLOCK = 5860, 256  # distinct training scenes: 1.5 million, painted in blocks
FIRST = 40_000  # scenes that must be painted before training begins
LABELS = 18  # the longest caption with its end token has 17
IGNORED = -100  # label that the loss ignores
STEPS, BATCH, RATE = 14_000, 1024, 1e-3
WARM_UP = 0.03  # share of training in which the learning rate rises
EVALUATED = 2000  # held-out scenes

Painted = tuple[NDArray[np.uint8], list[str]]  # pixels [BLOCK, height, width, 3] and captions


def paint_block(number: int) -> Painted:
    """Paints training scenes `number` × BLOCK and those that follow."""
    scenes = [scene_of("train", index) for index in range(number * BLOCK, (number + 1) * BLOCK)]
    return np.stack([np.asarray(paint(scene)) for scene in scenes]), [scene.caption for scene in scenes]


class SceneStore:
    """Holds on the device all scenes painted so far. `batch` draws from them with replacement."""

    def __init__(self, painted: IMapIterator[Painted], tokenizer: PreTrainedTokenizerBase, device: str) -> None:
        self._painted, self._tokenizer = painted, tokenizer
        size = build.IMAGE_SIZE
        self._pixels = torch.empty((BLOCKS * BLOCK, size, size, 3), dtype=torch.uint8, device=device)
        self._labels = torch.empty((BLOCKS * BLOCK, LABELS), dtype=torch.int64, device=device)
        self.filled = 0

    def fill(self, least: int = 0) -> None:
        """Takes in the scenes that are painted by now. Waits for the first `least` scenes."""
        while self.filled < len(self._pixels):
            try:
                pixels, captions = self._painted.next(None if self.filled < least else 0)
            except multiprocessing.TimeoutError:
                return
            rows = [[*ids, self._tokenizer.eos_token_id] for ids in self._tokenizer(captions)["input_ids"]]
            labels = [row + [IGNORED] * (LABELS - len(row)) for row in rows]
            block = slice(self.filled, self.filled + BLOCK)
            self._pixels[block] = torch.from_numpy(pixels).to(self._pixels.device)
            self._labels[block] = torch.tensor(labels).to(self._labels.device)
            self.filled += BLOCK

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns normalised pixels, float32 [BATCH, 3, H, W], and labels, int64 [BATCH, LABELS]."""
        chosen = torch.randint(self.filled, (BATCH,), device=self._pixels.device)
        pixels = self._pixels[chosen].permute(0, 3, 1, 2).float()
        return pixels / 127.5 - 1, self._labels[chosen]


def train(model: Any, store: SceneStore, max_seconds: float) -> None:
    """Trains the model in place, for `STEPS` steps or `max_seconds` seconds, whichever is shorter."""
    model.train()
    weights = list(model.parameters())
    groups = [  # only matrices have weight decay
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": 0.05},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), fused=True)
    began = time.monotonic()
    for step in range(STEPS):
        seconds = time.monotonic() - began
        done = max(step / STEPS, seconds / max_seconds)
        if done >= 1:
            break
        store.fill()
        for group in optimizer.param_groups:
            group["lr"] = RATE * _schedule(done)
        pixels, labels = store.batch()
        with torch.autocast(pixels.device.type, torch.bfloat16):
            loss = model(pixel_values=pixels, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 200 == 0:
            print(f"step {step:6} {seconds:5.0f} s  loss {loss.item():.5f}  {store.filled:,} scenes", flush=True)
    model.eval()


def _schedule(done: float) -> float:
    """Returns the factor of the learning rate: linear warm-up, then a cosine down to zero."""
    if done < WARM_UP:
        return done / WARM_UP
    return (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained checkpoint")
    parser.add_argument("--max-seconds", type=float, default=900, help="training ends then at the latest")
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = build.build_tokenizer()
    model: Any = build.build_model(tokenizer)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    processes = max(1, (os.cpu_count() or 2) - 4)
    with multiprocessing.get_context("fork").Pool(processes) as pool:  # forked before CUDA is initialised
        painted = pool.imap_unordered(paint_block, range(BLOCKS))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        store = SceneStore(painted, tokenizer, device)
        store.fill(FIRST)
        train(model.to(device), store, options.max_seconds)
    build.save(model.float().cpu(), tokenizer, options.out)
    print(report(list(answers(Captioner.open(options.out, device), EVALUATED))))


if __name__ == "__main__":
    main()
