"""A start from S3 with weights: what counts as one, and what is printed of it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from snapcap.benchmarks.harness.moto_store import S3Artifacts
from snapcap.benchmarks.harness.workload import open_workload
from snapcap.benchmarks.report.charts import Segment
from snapcap.benchmarks.report.tables import Report
from snapcap.benchmarks.startup import bench as startup_bench
from snapcap.benchmarks.startup import command as startup_command
from snapcap.benchmarks.startup.bench import PUBLISHED, Bench
from snapcap.benchmarks.startup.command import CaseResult
from snapcap.benchmarks.startup.start import Machine, ServerStart, Start, without_places

HIT = {"result": "hit", "bytes_fetched": 3 << 20}


def begin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, weights: dict[str, Any], case: str = PUBLISHED
) -> tuple[Start, list[Any]]:
    """A start of a server that says so of its weights, and how its store was made and it was asked for."""
    seen: list[Any] = []

    @contextmanager
    def artifacts(*given: Any) -> Iterator[S3Artifacts]:
        seen.append(given[2:])
        yield S3Artifacts(("--store", "s3://x"), {"KEY": "x"}, link_s=0.25)

    def run(self: ServerStart) -> Start:
        seen.append(self.command)
        return Start(1.0, [], {"ready": 1.0}, {"startup": {"weights": weights}})

    monkeypatch.setattr(startup_bench, "s3_artifacts", artifacts)
    monkeypatch.setattr(ServerStart, "run", run)
    workload = open_workload("demo", tmp_path)
    with ExitStack() as stack:
        machine = Machine(counts_children=False, gpu=False)
        bench = Bench(workload, machine, "cpu", tmp_path, tmp_path, ("--buckets=1",), stack, float("inf"))
        return bench.start(case), seen


def test_the_checkpoint_is_in_s3_and_the_bytes_are_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start, (given, command) = begin(monkeypatch, tmp_path, HIT)
    options, checkpoint = given
    assert "--model" not in options
    assert (checkpoint / "config.json").is_file()
    assert "--strict" in command
    assert (start.values["weights_mib"], start.values["link_s"]) == (3.0, 0.25)
    start, (given, _) = begin(monkeypatch, tmp_path, {}, "aot-s3")
    assert "--model" in given[0]
    assert "link_s" not in start.values


@pytest.mark.parametrize("weights", [{"result": "miss", "bytes_fetched": 0}, {"result": "hit", "bytes_fetched": 0}])
def test_a_start_that_fetched_no_weights_is_no_result(
    weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="did not come from S3"):
        begin(monkeypatch, tmp_path, weights)


def test_what_it_takes_beyond_a_folder_and_the_link_is_printed() -> None:
    def result(case: str, **values: float) -> CaseResult:
        facts = {"children": {"ended": 0, "alive": [], "none": True}, "compilers": []}
        return CaseResult(case, [Start(values["ready"], [Segment("all", 0.0, 1.0)], values, facts)])

    report = Report()
    startup_command.fill(
        report, [result("aot", ready=0.5), result(PUBLISHED, ready=1.0, link_s=0.25, weights_mib=11.3)]
    )
    (targets,) = [table for table in report.tables if table["title"] == "Against the targets"]
    (row,) = [row for row in targets["rows"] if "with weights" in row[0]]
    assert row[1:] == ["+0.25 s (of 1.00 - 0.50 - 0.25 for 11.3 MiB)", "≤ + 0.3 s"]


def test_what_is_kept_of_a_startup_names_no_place() -> None:
    names = ("marks", "phases", "backend", "tier", "device", "dtype", "torch_modules", "buckets")
    weights = {**HIT, "reason": "in /home/somebody"}
    kept = without_places({**dict.fromkeys(names), "artifacts": None, "weights": weights})
    assert kept["weights"] == HIT
