"""torch's operators, launched before torch is imported: on a CPU here, where no server does so."""

import ctypes
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.fakes.recorded_launches import expected_and_run, missing
from support.parity import device_cases
from support.servers.server_process import python

from snapcap.warmup.machine.torch_libraries import load_torch_libraries
from snapcap.warmup.runtime.aoti.container import AotiError
from snapcap.warmup.runtime.aoti.eager_launches import FP32, Launch, Like
from snapcap.warmup.runtime.aoti.operators import Operators
from snapcap.warmup.runtime.aoti.tensors import Zeros
from snapcap.warmup.start.ahead import launch_ahead

PROGRAM = """
import ctypes, json, logging, sys
from pathlib import Path
from snapcap.warmup.start.ahead import launch_ahead
from snapcap.warmup.runtime.aoti.eager_launches import eager_launches
from snapcap.warmup.options import ComputeOptions, StartOptions
from snapcap.warmup.plan.plan import make_plan
from snapcap.warmup.start.preparation import read_checkpoint

logging.basicConfig(format="%(message)s")
options = StartOptions(compute=ComputeOptions(device="cpu"))
config = read_checkpoint(options).config
launches = list(eager_launches(config, make_plan(config, options), 2))
here = [launch for launch in launches if "attention" not in launch.operator]
launch_ahead(here, "cpu")
print(json.dumps([len(launches), len(here), "torch" in sys.modules]))
"""


def test_operators_run_without_torchs_module() -> None:
    run = python("-c", PROGRAM)
    assert run.returncode == 0, run.stderr
    every, here, imported = json.loads(run.stdout)
    assert here == every - 1, "a CPU has an attention of its own"
    assert not imported
    assert run.stderr == "", "nothing failed"


@pytest.mark.parametrize("family", ["vit_gpt2", "blip", "git"])
@pytest.mark.parametrize("rows", [1, 4])
def test_what_is_launched_ahead_is_what_a_first_caption_runs(family: str, rows: int, tmp_path: Path) -> None:
    captioner = getattr(device_cases, family)(tmp_path)
    with torch.no_grad():
        expected, run = expected_and_run(captioner, torch.device("cpu"), FP32, rows)
    assert len(expected) > 20
    assert missing(expected, run, on_cuda=False) == []


def test_an_operator_that_fails_is_named_and_the_others_are_run(caplog: pytest.LogCaptureFixture) -> None:
    row, column = Like(FP32, (1, 2), (2, 1)), Like(FP32, (3, 1), (1, 1))
    with caplog.at_level(logging.WARNING, "snapcap.start"):
        launch_ahead(
            [Launch("mm", (row, column)), Launch("addmm", (row, row, column)), Launch("mm", (column, row))], "cpu"
        )
    (record,) = caplog.records
    assert record.fields == {"error": "mm, addmm"}  # type: ignore[attr-defined]


def test_an_operator_that_libtorch_does_not_have_keeps_no_tensors() -> None:
    held: list[int] = []

    class Counted(Zeros):
        def make(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> int:
            held.append(super().make(dtype, shape, strides))
            return held[-1]

        def drop(self, tensor: int) -> None:
            held.remove(tensor)
            super().drop(tensor)

    libtorch = load_torch_libraries()
    assert libtorch is not None
    operators = Operators(ctypes.CDLL(None, handle=libtorch), Counted.on(libtorch, "cpu"))
    part = Like(FP32, (1, 2, 3, 4), (24, 12, 4, 1))
    with pytest.raises(AotiError, match="has no aoti_torch_cpu__scaled"):  # which is CUDA's
        operators.run(Launch("_scaled_dot_product_efficient_attention", (part, part, part)))
    operators.run(Launch("addmm", (Like(FP32, (2,), (1,)), Like(FP32, (3, 2), (2, 1)), Like(FP32, (2, 2), (2, 1)))))
    assert held == []
