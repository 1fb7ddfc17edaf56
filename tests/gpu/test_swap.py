"""From eager to compiled between two steps, bucket by bucket, while rows run: their tokens stay the same."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.parity.device_cases import FEW_BUCKETS, STEPS, Captioner, open_model, open_runner, plan_of

from snapcap.warmup.progress.status import COMPONENTS
from snapcap.warmup.runtime.model import EagerBackend
from snapcap.warmup.runtime.runner import Runner
from snapcap.warmup.runtime.slot_request import SlotRequest
from snapcap.warmup.start.background_build import swap_bucket

pytestmark = pytest.mark.timeout(600)  # compiling


@pytest.mark.parametrize("family", ["vit-gpt2", "blip", "git", "smolvlm", "llava", "florence2", "qwen3-vl"])
def test_running_rows_keep_their_tokens(
    family: str, captioners: dict[str, Captioner], packages: Any, device: torch.device
) -> None:
    """fp32, so that compiled and eager agree to the token."""
    captioner = captioners[family]
    plan = plan_of(device, "float32", FEW_BUCKETS)
    model = open_model(captioner, plan)
    runner = open_runner(model, plan, EagerBackend())
    images = captioner.images(4)
    one, four = plan.table.buckets

    def run(runner: Runner, swaps: list[Any]) -> list[list[int]]:
        """Three rows from the start, a fourth that joins in the middle; before every step, one swap."""
        runner.encode(four, images[:3], 0)
        runner.admit(0, [SlotRequest()] * 3)
        tokens: list[list[int]] = [[] for _ in range(4)]
        for step in range(STEPS):
            if step % 4 == 1 and swaps:
                component, bucket = swaps.pop(0)
                swap_bucket(runner, component, bucket, backend)
            if step == STEPS // 2:
                runner.encode(one, images[3:], 3)
                runner.admit(3, [SlotRequest()])
            runner.decode_step(four)
            rows = 3 if step < STEPS // 2 else 4
            for row, token in enumerate(runner.tokens(rows)):
                tokens[row].append(token)
        return tokens

    backend = packages.backend(family, "float32", model)
    expected = run(runner, [])
    swaps = [(component, bucket) for bucket in (four, one) for component in COMPONENTS]
    with patch.object(runner, "bind", wraps=runner.bind) as bind:
        assert run(runner, list(swaps)) == expected
    assert [call.args[:2] for call in bind.call_args_list] == swaps
    assert run(runner, []) == expected, "compiled from the first step on"
