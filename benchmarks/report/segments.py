"""Cuts a start into consecutive stretches, which sum to its total even if phases overlap."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from snapcap.warmup.progress.timeline import BESIDE

HTTP, WAIT, CAPTION = "http", "other", "first_caption"


@dataclass(frozen=True)
class Segment:
    """A stretch of the start, in seconds since the process was spawned."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def from_marks(marks: Sequence[tuple[float, str]], spawned: float, total: float, rest: str) -> list[Segment]:
    """Returns the stretches between a child's marks. The time from the last mark until ``total`` is called
    ``rest``.

    ``spawned`` is on the clock of the marks, ``total`` in seconds since then.
    """
    segments, begin = [], 0.0
    for moment, name in marks:
        end = min(max(moment - spawned, begin), total)
        segments.append(Segment(name, begin, end))
        begin = end
    if total > begin or not segments:
        segments.append(Segment(rest, begin, total))
    return _merged(segments)


def from_startup(startup: Mapping[str, Any], total: float) -> list[Segment]:
    """Returns the stretches of a snapcap start from its ``/startup``, up to ``total`` seconds after the spawn.

    Phases overlap. Each instant belongs to the phase that the start waits for: a phase of the device thread before
    one that runs beside it, and then the phase that began last. An instant without a phase is ``http``, the
    server's own import, until /livez, ``other`` until READY, and ``first_caption`` after it.
    """
    phases = [
        Segment(phase["name"], min(phase["start"], total), min(phase["end"] or total, total))
        for phase in startup["phases"]
    ]
    marks = startup["marks"]
    live, ready = min(marks.get("live", total), total), min(marks.get("ready", total), total)
    cuts = sorted({0.0, total, live, ready, *(p.start for p in phases), *(p.end for p in phases)})
    segments = []
    for begin, end in pairwise(cuts):
        running = [phase for phase in phases if phase.start <= begin and phase.end >= end]
        if running:
            name = max(running, key=lambda phase: (phase.name not in BESIDE, phase.start)).name
        else:
            name = HTTP if end <= live else WAIT if end <= ready else CAPTION
        segments.append(Segment(name, begin, end))
    return _merged(segments)


def seconds_by_name(segments: Iterable[Segment]) -> dict[str, float]:
    """Returns the total seconds of each name, in order of first appearance."""
    totals: dict[str, float] = {}
    for segment in segments:
        totals[segment.name] = totals.get(segment.name, 0.0) + segment.seconds
    return totals


def _merged(segments: Iterable[Segment]) -> list[Segment]:
    """Returns the stretches without empty ones, and with neighbours of the same name joined."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and merged[-1].name == segment.name:
            merged[-1] = Segment(segment.name, merged[-1].start, segment.end)
        elif segment.end > segment.start:
            merged.append(segment)
    return merged
