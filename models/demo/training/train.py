"""Trains the demo model and prints its exact match on held-out scenes.

python -m snapcap.models.demo.training.train --out DIR
"""

from __future__ import annotations

import argparse
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from snapcap.models.demo.training import build
from snapcap.models.demo.training.accuracy import Captioner, answers, report
from snapcap.models.demo.training.dataset import BLOCK, SceneStore, painted_blocks

LABELS = 18  # the longest caption with its end token has 17
WARM_UP = 0.03  # share of training in which the learning rate rises


def main() -> None:
    options = _options()
    torch.manual_seed(options.seed)
    model, tokenizer = _start(options.start)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    blocks = -(-options.scenes // BLOCK)
    with painted_blocks(options.first_scene // BLOCK, blocks, options.processes) as painted:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        store = SceneStore(blocks * BLOCK, build.IMAGE_SIZE, LABELS, device)
        threading.Thread(target=store.fill, args=(painted, tokenizer), daemon=True).start()
        store.wait_for(min(blocks * BLOCK, options.wait_for))
        train(model.to(device), store, options)
    build.save(model.float().cpu(), tokenizer, options.out)
    results = list(answers(Captioner.open(options.out, device), options.evaluate))
    print(report(results))


def _start(folder: Path | None) -> tuple[Any, PreTrainedTokenizerBase]:
    if folder is not None:
        return build.reopen(folder)
    tokenizer = build.build_tokenizer()
    return build.build_model(tokenizer), tokenizer


def train(model: Any, store: SceneStore, options: argparse.Namespace) -> None:
    """Trains the model in place, for `steps` steps or `max_seconds` seconds, whichever is shorter."""
    model.train()
    optimizer = torch.optim.AdamW(_groups(model), lr=options.rate, betas=(0.9, 0.98), fused=True)
    began = time.monotonic()
    for step, done in enumerate(_progress(options.steps, options.max_seconds)):
        for group in optimizer.param_groups:
            group["lr"] = options.rate * _schedule(done)
        pixels, labels = store.batch(options.batch)
        with torch.autocast(pixels.device.type, torch.bfloat16):
            loss = model(pixel_values=pixels, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % options.log_every == 0:
            store.wait_for(0)  # raises if painting has failed
            seconds = time.monotonic() - began
            print(f"step {step:6} {seconds:5.0f} s  loss {loss.item():.5f}  {store.filled:,} scenes", flush=True)
    model.eval()


def _progress(steps: int, max_seconds: float) -> Iterator[float]:
    """Yields the finished share of training before each step, from 0 to 1, by steps or by time."""
    began = time.monotonic()
    for step in range(steps):
        done = max(step / steps, (time.monotonic() - began) / max_seconds)
        if done >= 1:
            return
        yield done


def _schedule(done: float) -> float:
    """Returns the factor of the learning rate: linear warm-up, then a cosine down to zero."""
    if done < WARM_UP:
        return done / WARM_UP
    return (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))) / 2


def _groups(model: torch.nn.Module) -> list[dict[str, object]]:
    """Returns parameter groups in which only matrices have weight decay."""
    weights = list(model.parameters())
    return [
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": 0.05},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained checkpoint")
    parser.add_argument(
        "--start", type=Path, help="go on from this checkpoint folder instead of from random weights"
    )
    parser.add_argument("--first-scene", type=int, default=0, help="number of the first training scene")
    parser.add_argument("--steps", type=int, default=14_000)
    parser.add_argument(
        "--max-seconds", type=float, default=900, help="training ends after this time at the latest"
    )
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--scenes", type=int, default=1_500_000, help="distinct training scenes")
    parser.add_argument("--wait-for", type=int, default=40_000, help="start training once these are painted")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 4))
    parser.add_argument("--evaluate", type=int, default=2000, help="held-out scenes")
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
