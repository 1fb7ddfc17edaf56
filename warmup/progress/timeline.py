"""Records the phases and moments of the start, in seconds since this process was executed. No torch."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from snapcap.models.dataclass import dataclass

PHASES = (
    "interpreter",
    "bind",
    "import_engine",  # only on a server: this phase and all below run in the engine process
    "load_cpu_library",  # only in a compiled start whose packages run on the CPU library
    "load_libraries",  # in other compiled starts: libtorch without its Python module
    "import_torch",  # in every other start
    "import_compiler",  # only with the jit backend
    "device_init",
    "fetch_artifacts",
    "fetch_weights",
    "load_weights",
    "load_artifacts",
    "warm_encoder",
    "warm_decoder",
    "capture_graphs",
    "self_test",
    "rehearsal",  # only on a server
)


@dataclass(frozen=True)
class Phase:
    """Times a phase of the start; ``end`` is None while it runs. Phases in different threads may overlap."""

    name: str
    start: float
    end: float | None = None


class Timeline:
    """Collects phases and marks from any thread."""

    def __init__(self, origin: float) -> None:
        """``origin`` is the moment of the process's exec on the clock of ``time.monotonic``."""
        self.origin = origin
        self._lock = threading.Lock()
        self._phases: list[Phase] = []
        self._marks: dict[str, float] = {}
        self._listeners: list[Callable[[Phase], None]] = []

    @classmethod
    def since_exec(cls) -> "Timeline":
        """Returns a timeline of this process. Its first phase, ``interpreter``, ends now."""
        timeline = cls(process_start())
        timeline.add(Phase("interpreter", 0.0, timeline.now()))
        return timeline

    def listen(self, listener: Callable[[Phase], None]) -> None:
        """Call ``listener`` with every phase so far, and with each later phase when it begins and when it ends."""
        with self._lock:
            self._listeners.append(listener)
            phases = tuple(self._phases)
        for phase in phases:
            listener(phase)

    def now(self) -> float:
        """Returns the seconds since exec."""
        return time.monotonic() - self.origin

    def add(self, phase: Phase) -> None:
        """Add a phase that the caller has timed. An ended phase replaces its unended entry."""
        with self._lock:
            running = replace(phase, end=None)
            if running in self._phases:
                self._phases[self._phases.index(running)] = phase
            else:
                self._phases.append(phase)
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener(phase)

    @contextmanager
    def phase(self, name: str, start: float | None = None) -> Iterator[None]:
        """Record the block as a phase, even if it raises. ``start``: seconds since exec at its begin; None: now."""
        started = Phase(name, self.now() if start is None else start)
        self.add(started)
        try:
            yield
        finally:
            self.add(replace(started, end=self.now()))

    def mark(self, name: str) -> None:
        """Record a moment ("live", "ready", "first_caption"); only the first call of a name counts."""
        now = self.now()
        with self._lock:
            self._marks.setdefault(name, now)

    def phases(self) -> list[Phase]:
        """Returns the phases in the order in which they began."""
        with self._lock:
            return sorted(self._phases, key=lambda phase: phase.start)

    def marks(self) -> dict[str, float]:
        with self._lock:
            return dict(self._marks)

    def current(self) -> str | None:
        """Returns the name of the running phase that began last; None if no phase runs."""
        running = [phase.name for phase in self.phases() if phase.end is None]
        return running[-1] if running else None


def process_start() -> float:
    """Returns the moment when this process was created, on the clock of ``time.monotonic``.

    Linux counts it in ticks since boot (proc(5), field 22 of ``stat``). On other systems this is the import of this
    module, so earlier work is not counted."""
    try:
        stat = Path("/proc/self/stat").read_text()

        ticks = int(stat.rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - time.process_time()
    # A tick is 10 ms, so the moment may seem to be in the future. A clock that jumped would give a wrong hour.
    return time.monotonic() - max(age, 0.0)
