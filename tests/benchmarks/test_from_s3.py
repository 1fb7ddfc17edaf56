"""A start from S3 with weights: what counts as one, and what is noted of it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from snapcap.benchmarks import startup
from snapcap.benchmarks.contenders import Contenders, Start
from snapcap.benchmarks.harness.workload import open_workload
from snapcap.benchmarks.startup import PUBLISHED, Bench

HIT = {"result": "hit", "bytes_fetched": 3 << 20}


def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, weights: dict[str, Any]) -> tuple[Start, list[Any]]:
    """A start of a server that says so of its weights, and how its store was made and it was asked for."""
    seen: list[Any] = []

    @contextmanager
    def artifacts(*given: Any) -> Iterator[tuple[int, tuple[str, ...]]]:
        seen.append(given[2:])
        yield 1, ("--store", "s3://x")

    def serve(_: Bench, command: tuple[str, ...], *__: Any) -> Start:
        seen.append(command)
        buckets = [{"component": "encoder", "size": 1, "backend": "aot", "state": "warm"}]
        return Start({"ready": 1.0}, {"tier": "aot", "buckets": buckets, "weights": weights})

    monkeypatch.setattr(startup, "s3_artifacts", artifacts)
    monkeypatch.setattr(Bench, "_serve", serve)
    workload = open_workload("demo", tmp_path)
    with ExitStack() as stack:
        contenders = Contenders(workload, "cpu", *[tmp_path] * 2, ("--buckets=1",), end=float("inf"))
        return Bench(contenders, stack).start(PUBLISHED), seen


def test_the_checkpoint_is_in_s3_and_the_bytes_are_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start, (given, command) = begin(monkeypatch, tmp_path, HIT)
    options, checkpoint = given
    assert "--model" not in options
    assert (checkpoint / "config.json").is_file()
    assert "--strict" in command
    assert "--model" not in command
    assert start.values["weights_mib"] == 3.0


@pytest.mark.parametrize("weights", [{"result": "miss", "bytes_fetched": 0}, {"result": "hit", "bytes_fetched": 0}])
def test_a_start_that_fetched_no_weights_is_no_result(
    weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="did not come from S3"):
        begin(monkeypatch, tmp_path, weights)
