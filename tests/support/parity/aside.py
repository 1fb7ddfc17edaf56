"""Runs a bucket between two steps of rows, and looks at what it changes. No case is specific to a device."""

from collections.abc import Callable
from typing import Any

import torch
from support.parity.device_cases import STEPS, Captioner

from snapcap.models.regions.state import CACHES, FEATURES
from snapcap.warmup.plan.plan import Bucket
from snapcap.warmup.progress.status import COMPONENTS
from snapcap.warmup.runtime.runner import Runner
from snapcap.warmup.runtime.slot_request import SlotRequest


def run_aside(runner: Runner[Any], bucket: Bucket) -> None:
    for component in COMPONENTS:
        if runner.is_bound(component, bucket):
            runner.run_aside(component, bucket)


def tokens(
    runner: Runner[Any], bucket: Bucket, captioner: Captioner, between: Callable[[], object] = lambda: None
) -> list[list[int]]:
    """The tokens of three rows in a bucket of four, with something before each step."""
    runner.encode(bucket, captioner.images(3), 0)
    runner.admit(0, [SlotRequest()] * 3)
    found = []
    for _ in range(STEPS):
        between()
        runner.decode_step(bucket)
        found.append(runner.tokens(3))
    return found


def changed(runner: Runner[Any], bucket: Bucket) -> list[str]:
    """The buffers of which a run aside changes more than the scratch slot and the K/V of the last position."""
    state = runner.state
    last = state.cache_length - 1

    def read(name: str, buffer: Any) -> torch.Tensor:
        slots: torch.Tensor = buffer.narrow(int(name in (*CACHES, FEATURES)), 0, state.slots)
        if name in ("key", "value"):
            slots = slots.narrow(4 if name == "key" else 3, 0, last)
        return slots.clone()

    before = {name: read(name, buffer) for name, buffer in state.buffers.items()}
    run_aside(runner, bucket)
    return [name for name, buffer in state.buffers.items() if not torch.equal(before[name], read(name, buffer))]
