"""The order of the starts, and what happens to the others when one fails, is missing, or there is no time left."""

import time
from typing import Any, cast

from snapcap.benchmarks.report.charts import Segment
from snapcap.benchmarks.startup.bench import Bench, UnavailableError
from snapcap.benchmarks.startup.command import Session
from snapcap.benchmarks.startup.start import Start


class Recorder:
    """A bench that starts nothing; ``seconds`` is how long a start of a case takes."""

    def __init__(self, end: float = float("inf"), seconds: dict[str, float] | None = None) -> None:
        self.end = end
        self.order: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.compilers: list[str] = []
        self.compiles_serving = 0.0
        self._seconds = seconds or {}

    def prepare(self, case: str) -> None:
        self.order.append(f"{case} prepared")

    def check(self, case: str) -> None:
        if isinstance(self.broken.get(case), UnavailableError):
            raise self.broken[case]

    def start(self, case: str, watched: bool = False, whole_build: bool = False) -> Start:
        self.order.append(case + " watched" * watched + " whole" * whole_build)
        time.sleep(self._seconds.get(case, 0.0))
        if case in self.broken:
            raise self.broken[case]
        values = {"compiles_serving": self.compiles_serving}
        return Start(1.0, [Segment("all", 0.0, 1.0)], values, {"compilers": self.compilers})


def session(bench: Recorder, *names: str, runs: int = 2) -> Session:
    return Session(cast("Bench", bench), names, runs)


def starts(bench: Recorder) -> list[str]:
    return [event for event in bench.order if "prepared" not in event]


def test_cases_take_turns_and_the_warm_ones_are_watched_once_at_the_end() -> None:
    bench = Recorder()
    session(bench, "floor", "aot", "eager").run()
    turn = ["floor", "aot", "eager"]
    assert starts(bench) == ["floor", *turn, *turn, "aot watched", "eager watched"]


def test_what_compiles_from_nothing_comes_once_and_before_its_warm_case_is_prepared() -> None:
    bench = Recorder()
    run = session(bench, "aot", "cold", "jit", "jit-cold", runs=2)
    run.run()
    assert bench.order[:2] == ["cold whole", "jit-cold"]
    assert bench.order.index("jit prepared") > 1
    assert bench.order.count("cold whole") == bench.order.count("jit-cold") == 1
    assert (len(run.results["cold"].starts), len(run.results["jit-cold"].starts)) == (2, 1)


def test_a_warm_start_that_starts_a_compiler_has_failed() -> None:
    bench = Recorder()
    bench.compilers = ["gcc"]
    run = session(bench, "aot", "jit")
    run.run()
    assert run.results["aot"].problem == "failed: it started gcc"
    assert run.results["jit"].problem == ""  # whose compiler may want a launcher compiled


def test_a_start_that_compiles_after_ready_has_failed() -> None:
    bench = Recorder()
    bench.compiles_serving = 1.0
    run = session(bench, "jit", runs=2)
    run.run()
    assert run.results["jit"].problem == "failed: it compiled 3 graphs after READY"


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
