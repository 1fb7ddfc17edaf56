"""Runs the starts of several cases in turn, within a time limit. A case that fails does not stop the others."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rich.console import Console

from snapcap.benchmarks.peers.commands import PEERS
from snapcap.benchmarks.startup.bench import FLOOR, ONCE, TITLES, WARM, WATCHED, Bench, UnavailableError
from snapcap.benchmarks.startup.start import Start


@dataclass
class CaseResult:
    """Holds all starts of a case, the watched start, and the reason if there are no starts."""

    name: str
    starts: list[Start] = field(default_factory=list)
    watched: Start | None = None
    problem: str = ""

    @property
    def title(self) -> str:
        return TITLES[self.name]


class Session:
    """Runs cases until they are done or the time is over, and goes on when a case fails."""

    def __init__(self, bench: Bench, names: Iterable[str], runs: int) -> None:
        self.results = {name: CaseResult(name) for name in names}
        self._bench = bench
        self._runs = runs
        self._took: dict[str, float] = {}
        self._console = Console(stderr=True, highlight=False)

    def run(self) -> None:
        """Runs all cases.

        Cases that compile from nothing run first, once, because the warm cases use their results. Then every case
        runs in turn, ``runs`` times. At the end, the warm cases run once more under watch.
        """
        for name in self.results:
            self._try(name, self._bench.check)
        for name in (name for name in (FLOOR, *PEERS) if name in self.results and name not in ONCE):
            self._try(name, self._bench.prepare)
            # Brings files into the page cache: the first import of a package reads the disk.
            self._start(name, keep=False)
        for name in (name for name in ("cold", *ONCE) if name in self.results):
            self._start(name, whole_build=name == "cold")
        for name in self.results:
            self._try(name, self._bench.prepare)
        for run in range(self._runs):
            for name, result in self.results.items():
                if len(result.starts) <= run and not (run and name in ONCE):
                    self._start(name)
        for name in (name for name in WATCHED if name in self.results and self.results[name].starts):
            self._start(name, watched=True)
            self._judge(self.results[name])

    def _try(self, name: str, step: Callable[[str], None]) -> None:
        """Runs a step before the first start of a case."""
        result = self.results[name]
        if result.problem:
            return
        try:
            with self._console.status(f"preparing {name}"):
                step(name)
        except UnavailableError as error:
            result.problem = str(error)
        except Exception as error:
            self._failed(result, error)

    def _judge(self, result: CaseResult) -> None:
        """Records a failure of a warm start that starts a compiler or compiles after READY, however fast it was."""
        starts = [*result.starts, *([result.watched] if result.watched else [])]
        compilers = {name for start in starts for name in start.facts["compilers"]}
        if result.name in WARM and compilers:
            self._failed(result, RuntimeError(f"it started {', '.join(sorted(compilers))}"))
        graphs = sum(start.values.get("compiles_serving", 0.0) for start in starts)
        if graphs:
            self._failed(result, RuntimeError(f"it compiled {graphs:.0f} graphs after READY"))

    def _start(self, name: str, keep: bool = True, watched: bool = False, whole_build: bool = False) -> None:
        """Starts a case once, unless the case has failed or would not end within the time limit."""
        result, began = self.results[name], time.monotonic()
        if result.problem:
            return
        if began + self._took.get(name, 0.0) > self._bench.end:
            if not result.starts:
                result.problem = "not run: the time limit"
            return
        try:
            with self._console.status(f"{name}, run {len(result.starts) + 1} of {self._runs}"):
                start = self._bench.start(name, watched, whole_build)
        except Exception as error:
            self._failed(result, error)
            return
        if not whole_build:
            self._took[name] = time.monotonic() - began
        if watched:
            result.watched = start
        elif keep:
            result.starts.append(start)
        self._console.print(f"{name}: {start.total:.2f} s{'' if keep and not watched else ' (not counted)'}")

    def _failed(self, result: CaseResult, error: Exception) -> None:
        result.problem = "failed: " + (str(error).strip() or type(error).__name__).splitlines()[-1][:300]
        self._console.print(f"[red]{result.name}[/red] {error}")
