"""Buckets of decode steps alone: made ready after READY, from packages, beside rows that run."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parity.aside import run_aside, tokens
from support.parity.device_cases import FEW_BUCKETS, Captioner, open_model, open_runner, plan_of
from support.servers.device_starts import PREPARED
from support.servers.server_process import python, snapcap

from snapcap.warmup.runtime.model import EagerBackend

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.timeout(900)  # compiling


def test_a_start_makes_them_ready_after_ready_and_captions_in_them_are_those_of_other_buckets(
    device: torch.device, demo_folder: Path, tmp_path: Path
) -> None:
    buckets, steps = "1,64", "24,96"
    options = ("--device", device.type, "--buckets", buckets, "--step-buckets", steps, "--cache-dir", str(tmp_path))
    build = snapcap("build", *options, timeout=800, **PREPARED)
    assert build.returncode == 0, build.stderr
    run = python(
        *("-m", "support.programs.step_buckets", str(tmp_path), device.type, buckets, steps),
        str(demo_folder / "samples"),
        PYTHONPATH=f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}",
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    state = "captured" if device.type == "cuda" else "warm"
    assert (found["at_ready"], found["states"], found["torch"]) == (["pending"] * 2, [state] * 2, False)
    rows, captions = zip(found["before"], found["after"], strict=True)
    assert rows[0] <= 64 < rows[1] == 96
    assert captions[0] == captions[1]
    assert len({*captions[0]}) > 1


@pytest.mark.parametrize("family", ["vit-gpt2", "blip", "git", "smolvlm", "llava", "florence2", "qwen3-vl"])
def test_rows_keep_their_tokens_beside_a_bucket_that_runs(
    family: str, captioners: dict[str, Captioner], packages: Any, device: torch.device
) -> None:
    """In packages, and on a GPU between the graphs of the rows' steps."""
    captioner, plan = captioners[family], plan_of(device, "float32", FEW_BUCKETS)
    model, four = open_model(captioner, plan), plan.table.largest
    for backend in (EagerBackend(), packages.backend(family, "float32", model)):
        runner = open_runner(model, plan, backend)
        expected = tokens(runner, four, captioner)
        assert tokens(runner, four, captioner, partial(run_aside, runner, four)) == expected
