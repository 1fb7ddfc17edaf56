"""The order of the starts, and what happens to the others when one fails, is missing, or there is no time left."""

import time
from typing import Any, cast

from snapcap.benchmarks.startup import Bench, Session, Start, UnavailableError
from snapcap.benchmarks.waterfall import Segment


class Recorder:
    """A bench that starts nothing; ``seconds`` is how long a start of a case takes."""

    def __init__(self, end: float = float("inf"), seconds: dict[str, float] | None = None) -> None:
        self.end = end
        self.order: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.compiles_serving = 0.0
        self._seconds = seconds or {}

    def prepare(self, case: str) -> None:
        if isinstance(self.broken.get(case), UnavailableError):
            raise self.broken[case]
        self.order.append(f"{case} prepared")

    def start(self, case: str) -> Start:
        self.order.append(case)
        time.sleep(self._seconds.get(case, 0.0))
        if case in self.broken:
            raise self.broken[case]
        values = {"compiles_serving": self.compiles_serving}
        return Start(1.0, [Segment("all", 0.0, 1.0)], values)


def session(bench: Recorder, *names: str, runs: int = 2) -> Session:
    return Session(cast("Bench", bench), names, runs)


def starts(bench: Recorder) -> list[str]:
    return [event for event in bench.order if "prepared" not in event]


def test_cases_take_turns_after_one_start_that_does_not_count() -> None:
    bench = Recorder()
    run = session(bench, "floor", "aot", "eager")
    run.run()
    turn = ["floor", "aot", "eager"]
    assert starts(bench) == ["floor", *turn, *turn]
    assert {len(result.starts) for result in run.results.values()} == {2}


def test_a_start_that_compiles_after_ready_has_failed() -> None:
    bench = Recorder()
    bench.compiles_serving = 1.0
    run = session(bench, "aot", runs=2)
    run.run()
    assert run.results["aot"].problem == "failed: it compiled 2 graphs after READY"


def test_a_case_that_fails_is_named_and_the_others_go_on() -> None:
    bench = Recorder()
    bench.broken["eager"] = RuntimeError("first line\nthe cause")
    run = session(bench, "floor", "eager", runs=3)
    run.run()
    assert run.results["eager"].problem == "failed: the cause"
    assert bench.order.count("eager") == 1
    assert len(run.results["floor"].starts) == 3


def test_a_case_that_cannot_be_run_here_is_no_failure() -> None:
    bench = Recorder()
    bench.broken["onnxruntime"] = UnavailableError("not installed: onnxruntime")
    run = session(bench, "floor", "onnxruntime")
    run.run()
    assert run.results["onnxruntime"].problem == "not installed: onnxruntime"
    assert "onnxruntime" not in bench.order


def test_no_start_begins_that_would_end_after_the_time() -> None:
    bench = Recorder(time.monotonic() + 0.3, {"floor": 0.1})
    run = session(bench, "floor", runs=50)
    began = time.monotonic()
    run.run()
    assert 1 <= len(run.results["floor"].starts) <= 3
    assert time.monotonic() - began < 5
    assert run.results["floor"].problem == ""


def test_a_case_for_which_there_was_no_time_says_so() -> None:
    bench: Any = Recorder(time.monotonic() - 1)
    run = session(bench, "eager")
    run.run()
    assert run.results["eager"].problem == "not run: the time limit"
