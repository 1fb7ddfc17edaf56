"""The order of the starts, and what happens to the others when one fails, is missing, or there is no time left."""

import time
from typing import Any, cast

from benchmarks.cases import Bench, UnavailableError
from benchmarks.segments import Segment
from benchmarks.session import Session
from benchmarks.start import Start


class Recorder:
    """A bench that starts nothing; ``seconds`` is how long a start of a case takes."""

    def __init__(self, end: float = float("inf"), seconds: dict[str, float] | None = None) -> None:
        self.end = end
        self.order: list[str] = []
        self.broken: dict[str, Exception] = {}
        self._seconds = seconds or {}

    def prepare(self, case: str) -> None:
        if isinstance(self.broken.get(case), UnavailableError):
            raise self.broken[case]

    def start(self, case: str, watched: bool = False, whole_build: bool = False) -> Start:
        self.order.append(case + " watched" * watched + " whole" * whole_build)
        time.sleep(self._seconds.get(case, 0.0))
        if case in self.broken:
            raise self.broken[case]
        return Start(1.0, [Segment("all", 0.0, 1.0)])


def session(bench: Recorder, *names: str, runs: int = 2) -> Session:
    return Session(cast("Bench", bench), names, runs)


def test_cases_take_turns_and_the_warm_ones_are_watched_once_at_the_end() -> None:
    bench = Recorder()
    session(bench, "floor", "aot", "eager").run()
    turn = ["floor", "aot", "eager"]
    assert bench.order == ["floor", *turn, *turn, "aot watched", "eager watched"]


def test_the_cold_start_comes_first_and_is_built_to_its_end_once() -> None:
    bench = Recorder()
    run = session(bench, "aot", "cold")
    run.run()
    assert bench.order[:2] == ["cold whole", "aot"]
    assert bench.order.count("cold whole") == 1
    assert len(run.results["cold"].starts) == 2


def test_what_compiles_for_minutes_is_started_once() -> None:
    bench = Recorder()
    session(bench, "eager", "full-compile", runs=3).run()
    assert bench.order.count("full-compile") == 1


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
    bench.broken["litserve"] = UnavailableError("not installed: litserve")
    run = session(bench, "floor", "litserve")
    run.run()
    assert run.results["litserve"].problem == "not installed: litserve"
    assert "litserve" not in bench.order


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
