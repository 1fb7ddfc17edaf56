"""Starts a model in this process, as a server would, and prints the tokens of every kind of request as JSON.

    python -m support.programs.choices CACHE DEVICE BUCKETS [crowded]

``crowded``: the device's memory is filled and freed between steps. SNAPCAP_TESTS_TESTED: what another run printed
as ``tested``; the start is then that of a model that wakes again.
"""

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from snapcap.models.memory.memory import Memory
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.plan.plan import BucketTable
from snapcap.warmup.progress.status import StartupStatus, torch_modules
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.runner import Runner
from snapcap.warmup.runtime.slot_request import Needs, SamplingParams, SlotRequest
from snapcap.warmup.start.start import load

STEPS = 12
KINDS: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams()] * 3,
    "sampled": [
        SamplingParams(temperature=1.2),
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    ],
    "penalised": [SamplingParams(repetition_penalty=1.5), SamplingParams(no_repeat_ngram_size=2, min_new_tokens=8)],
    "searched": [SamplingParams(num_beams=4)],
    "groups": [SamplingParams(num_beams=2), SamplingParams(num_beams=2, early_stopping=True, length_penalty=2.0)],
    "everything": [
        SamplingParams(num_beams=2, repetition_penalty=1.2, no_repeat_ngram_size=2),
        SamplingParams(temperature=0.7),
        SamplingParams(repetition_penalty=2.0),
    ],
}
PROMPT = (5, 9)


def main() -> None:
    cache, device, sizes, *more = sys.argv[1:]
    options = StartOptions(
        # Without prepared weights a start needs torch.
        ModelOptions("demo", Path(cache), prepared_weights="SNAPCAP_TESTS_WITH_TORCH" not in os.environ),
        ComputeOptions(device, buckets=tuple(map(int, sizes.split(","))), backend="aot", strict=True),
        tested=os.environ.get("SNAPCAP_TESTS_TESTED", ""),
    )
    status = StartupStatus()
    started = load(options, Timeline.since_exec(), status)
    runner, table = started.runner, started.plan.table
    crowd = Crowd(runner.state.memory, more == ["crowded"])
    luck, drawn = random.Random(5), np.random.default_rng(3)
    shape = (*runner.config.vision.image_size, 3)
    images = [drawn.integers(0, 256, shape, dtype=np.uint8) for _ in range(3)]
    found: dict[str, Any] = {}
    for name, asked in KINDS.items():
        for prompt in ((), PROMPT):
            numbers = [[luck.random() for _ in range(runner.state.cache_length)] for _ in asked]
            rows = [SlotRequest(prompt, *each, STEPS) for each in zip(asked, numbers, strict=True)]
            found[f"{name} {prompt}"] = tokens(runner, table, images, rows, crowd)
    found["moved"] = moved(runner, table, images, crowd)
    states = sorted({bucket.state for bucket in status.buckets()})
    facts = {
        "states": states,
        "torch": torch_modules(),
        "mapped": mapped(),
        "refused": crowd.refused,
        "tested": status.state.tested,
        "rehearses": started.rehearses,
    }
    print(json.dumps({"tokens": found, **facts}))


def tokens(
    runner: Runner[Any],
    table: BucketTable,
    images: list[np.ndarray],
    rows: list[SlotRequest],
    crowd: Callable[[], object],
) -> list[Any]:
    """Returns for each step the tokens of all rows and the hypotheses of beam searches that have ended."""
    runner.encode(table.fit(len(rows)), images[: len(rows)], 0)
    runner.admit(0, rows)
    count = len(rows)
    for number, row in enumerate(rows):
        if row.params.searches:
            others = list(range(count, count + row.params.num_beams - 1))
            runner.group([number, *others], row)
            count += len(others)
    needs = Needs(
        any(row.params.samples for row in rows),
        any(row.params.penalised for row in rows),
        any(row.params.searches for row in rows),
    )
    steps: list[Any] = []
    for step in range(STEPS):
        if step % 4 == 1:
            crowd()
        runner.decode_step(table.fit(count), needs)
        pending = runner.read_tokens(count, needs.beams)
        steps.append([pending.result(), sorted(pending.hypotheses().items())])
    return steps


def moved(
    runner: Runner[Any], table: BucketTable, images: list[np.ndarray], crowd: Callable[[], object]
) -> list[list[int]]:
    """Three rows, of which the last two go on in other slots."""
    runner.encode(table.fit(3), images, 0)
    runner.admit(0, [SlotRequest(), SlotRequest(PROMPT), SlotRequest((7,))])
    steps = []
    for step in range(STEPS):
        if step % 4 == 1:
            crowd()
        runner.decode_step(table.fit(3))
        steps.append(runner.tokens(3))
        if len(steps) == 3:
            runner.move([(2, 0)])
    return steps


class Crowd:
    """Fills the device's memory with ones and frees it again; then no memory is anybody's that is not held."""

    def __init__(self, memory: Memory[Any], crowded: bool) -> None:
        self._memory, self._crowded = memory, crowded
        self.refused = 0

    def __call__(self) -> None:
        if not self._crowded:
            return
        held, size = [], 1 << 36
        while size >= 1 << 20:
            try:
                held.append(self._memory.zeros("uint8", (1, size)))
            except RuntimeError:  # libtorch gives back what it has cached, and says that it is not enough
                self.refused += 1
                size >>= 1
        ones = np.full((1, 1 << 20), 255, np.uint8)
        for block in held[-8:]:
            self._memory.write(self._memory.view(block, slice(None), slice(1 << 20)), [0], ones)


def mapped() -> list[str]:
    """The libraries of torch's module that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({Path(line.split()[-1]).name for line in lines if "libtorch_python" in line})


if __name__ == "__main__":
    main()
