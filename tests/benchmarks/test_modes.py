"""The ways of compiling: two of them for real, what is run and what is not, and what the tables make of numbers."""

import io
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console
from support.checkpoints.qwen3_vl_files import VISION_END, generated, picture, prefix, qwen3_vl, written

from snapcap.benchmarks import modes
from snapcap.benchmarks.contenders import Turns
from snapcap.benchmarks.harness.compiled_case import How, Job, Mode, Way
from snapcap.benchmarks.harness.report import Report, Samples
from snapcap.benchmarks.harness.workload import DEMO, SAMPLES
from snapcap.benchmarks.modes import CASES, measure, measure_all, with_needed

JOB = Job(DEMO, SAMPLES / "pair-1.png", "cpu", (1, 2), How("eager"))
FOREVER = float("inf")


def samples(**values: float) -> Samples:
    return Samples.of([values])


def test_the_eager_case_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = measure("eager", JOB, tmp_path)
    assert len(found["tokens"]) == 20
    assert 0 < found["until_interpreter"] < found["until_import_torch"] < found["until_first_step"]
    assert found["until_first_step"] < found["until_all_buckets"]
    steady = [found[f"{component}_{size}"] for component in ("encoder", "decoder") for size in JOB.buckets]
    assert all(value > 0 for value in steady)
    assert found["initial_encoder"] > 0
    assert found["peak_host_mib"] > 100
    assert "graphs" not in found  # no compiler was imported


def test_a_picture_of_any_shape_is_encoded_for_the_fewest_tokens_that_hold_it(tmp_path: Path) -> None:
    """DeepStack's features are read and added between the layers of blocks."""
    model = qwen3_vl(seed=7)
    model.generation_config.eos_token_id = None
    folder, image = written(model, tmp_path / "model"), picture(4, 3)
    image.save(tmp_path / "image.png")
    found = measure("eager", replace(JOB, model=folder, image=tmp_path / "image.png", buckets=(2,)), tmp_path)
    assert found["tokens"] == generated(model, image, prefix(), [VISION_END], 20)[0]


def test_a_case_that_fails_says_why_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(name: str, _job: Job, _kept: Path) -> dict[str, object]:
        if name == "full":
            raise RuntimeError("no compiler")
        return {"until_first_step": 1.0, "tokens": [1]}

    monkeypatch.setattr(modes, "measure", one)
    turns = Turns(end=FOREVER)
    found = measure_all(turns, list(CASES), 2, JOB, tmp_path)
    assert turns.problems == {
        "full": "failed: no compiler",
        "full-restored": f"there is nothing to restore of {CASES['full'].title}",
        "reduce-overhead": "needs a CUDA device",
    }
    assert set(found) == set(CASES) - set(turns.problems)
    assert all([run["until_first_step"] for run in runs] == [1.0, 1.0] for runs in found.values())


def test_a_case_without_an_image_fails_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no-such-image"):
        measure("eager", replace(JOB, image=Path("no-such-image")), tmp_path)


def test_nothing_is_begun_after_the_time_limit(tmp_path: Path) -> None:
    turns = Turns(end=time.monotonic())
    assert not measure_all(turns, ["eager", "full"], 1, JOB, tmp_path)
    assert set(turns.problems.values()) == {"not run in full: the time limit"}


def shown(results: dict[str, Samples], tokens: dict[str, list[int]], buckets: tuple[int, ...]) -> list[list[str]]:
    """The words of the tables' lines."""
    report, output = Report(), io.StringIO()
    modes.fill(report, results, tokens, buckets)
    Console(file=output, width=200).print(*report.tables)
    return [line.split() for line in output.getvalue().splitlines() if line.strip()]


def test_ratios_are_to_eager_and_other_tokens_are_named() -> None:
    steps = {"encoder_1": 10, "encoder_2": 20, "decoder_1": 4, "decoder_2": 6}
    eager = samples(until_first_step=2, until_all_buckets=2, peak_host_mib=200, **steps)
    steps = {"encoder_1": 4, "encoder_2": 8, "decoder_1": 2, "decoder_2": 3}
    full = samples(until_first_step=30, until_all_buckets=50, peak_host_mib=300, **steps)
    lines = shown({"eager": eager, "full": full}, {"eager": [1, 2], "full": [1, 3]}, (1, 2))
    assert ["full", "model", "30.0", "15.00", "×", "50.0", "25.00", "×", "300"] in lines
    times = ["4.000", "0.40", "×", "8.000", "0.40", "×", "2.000", "0.50", "×", "3.000", "0.50", "×"]
    assert ["full", "model", *times] in lines
    assert lines[-1] == ["full", "model"]
    assert ["other", "than", "eager's"] in lines


def test_without_eager_there_are_no_ratios() -> None:
    lines = shown({"full": samples(until_first_step=30, encoder_1=4)}, {"full": [1]}, (1,))
    assert ["full", "model", "30.0"] in lines
    assert ["full", "model", "4.000"] in lines


def test_graphs_have_a_table_of_their_own() -> None:
    eager = samples(until_first_step=2, encoder_1=10, encoder_1_graph=5, device_peak_mib=700)
    lines = shown({"eager": eager}, {"eager": [1]}, (1,))
    assert ["Later", "steps,", "replayed", "as", "CUDA", "graphs"] in lines
    assert ["eager", "2.0", "1.00", "×", "700"] in lines
    assert ["eager", "5.000", "1.00", "×"] in lines


def test_what_is_restored_is_measured_before() -> None:
    order = list(CASES)
    for name, case in CASES.items():
        assert not case.restores or order.index(case.restores) < order.index(name)


def test_eager_and_what_is_restored_are_measured_too() -> None:
    assert with_needed(["jit-restored"]) == ["eager", "jit", "jit-restored"]


def test_every_way_and_mode_has_a_case() -> None:
    given = {value for case in CASES.values() for value in vars(case.how).values()}
    assert {*get_args(Way), *get_args(Mode)} <= given
