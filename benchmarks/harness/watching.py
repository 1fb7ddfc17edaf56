"""Reads `benchmarks.harness.watcher`: a server's /livez latencies and memory between two moments."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from snapcap.benchmarks.harness.common import ROOT, environment
from snapcap.benchmarks.harness.measurements import percentile

_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Latencies:
    """Statistics of answered probes, in seconds."""

    count: int
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Latencies":
        values = sorted(seconds) or [0.0]
        return cls(len(values), percentile(values, 0.99), values[-1])


@dataclass(frozen=True)
class Window:
    """The observations between two moments.

    livez: probes of /livez.
    failed: number of probes of /livez without an answer.
    control: probes of a server that does nothing.
    stretch: how many times longer than its CPU time a little work took.
    peak: greatest memory of the server, in bytes.
    """

    livez: Latencies
    failed: int
    control: Latencies
    stretch: float
    peak: int


class Probe(NamedTuple):
    """An observation of `benchmarks.harness.watcher`."""

    kind: str
    began: float
    value: float

    def overlaps(self, began: float, ended: float) -> bool:
        """Returns whether it was under way at some time between two moments."""
        return self.began <= ended and self.began + self.value >= began


class ServerWatch:
    """Watches the server on a port. A context manager.

    ``pid`` is the server's first process, for its memory and the stretch. ``interval`` is the seconds between two
    probes.
    """

    def __init__(self, port: int, pid: int | None = None, interval: float = 0.01) -> None:
        options = ["--port", str(port), "--interval", str(interval)]
        self._command = [sys.executable, "-m", "snapcap.benchmarks.harness.watcher", *options]
        self._kinds = {"control"}
        if pid is not None:
            self._command += ["--pid", str(pid)]
            self._kinds |= {"memory", "stretch"}
        self._seen: list[Probe] = []
        self._latest: dict[str, float] = {}  # moment of the last observation, by kind
        self._changed = threading.Condition()

    def __enter__(self) -> "ServerWatch":
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.until(time.monotonic())
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._reader.join()

    def window(self, began: float, ended: float) -> Window:
        """Returns the probes that were under way between two moments of `time.monotonic`. Waits for the probes
        that still are.

        Raises:
            TimeoutError: the watcher has stopped writing.
        """
        self.until(ended)
        probes = self.probes(began, ended)

        def of(kind: str) -> list[float]:
            return [probe.value for probe in probes if probe.kind == kind]

        memory = [int(probe.value) for probe in self._snapshot("memory") if began <= probe.began <= ended]
        livez, control = Latencies.of(of("livez")), Latencies.of(of("control"))
        # The median is used, because the worst value depends on a scheduler's slices, and would allow a stall of
        # any length.
        stretches = [probe.value for probe in self._snapshot("stretch") if probe.overlaps(began, ended)]
        stretch = median(stretches) if stretches else 1.0
        return Window(livez, len(of("failed")), control, max(stretch, 1.0), max(memory, default=0))

    def probes(self, began: float, ended: float) -> list[Probe]:
        """Returns probes of /livez and of the control that were under way between two moments, and have ended by
        now."""
        return [probe for probe in self._snapshot("livez", "control", "failed") if probe.overlaps(began, ended)]

    def until(self, moment: float) -> None:
        """Waits until each kind has been observed after a moment.

        Raises:
            TimeoutError: the watcher has stopped writing.
        """

        def is_past() -> bool:
            late = {kind for kind, at in self._latest.items() if at >= moment}
            return self._kinds <= late and bool({"livez", "failed"} & late)

        with self._changed:
            if not self._changed.wait_for(is_past, _PATIENCE_S):
                raise TimeoutError("the watcher does not tell any more")

    def _snapshot(self, *kinds: str) -> list[Probe]:
        with self._changed:
            return [probe for probe in self._seen if probe.kind in kinds]

    def _read(self) -> None:
        if self._process.stdout is None:
            return
        for line in self._process.stdout:
            kind, at, value = json.loads(line)
            with self._changed:
                self._seen.append(Probe(kind, at, value))
                self._latest[kind] = at
                self._changed.notify_all()
