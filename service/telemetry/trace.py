"""Converts the start into a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

The Trace Event Format has complete events ("X"), instants ("i") and names ("M"). Times are whole microseconds since
exec.
"""

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from snapcap.models.dataclass import dataclass

_MARKS_TRACK = 0


@dataclass(frozen=True)
class _Span:
    """A span of time, in microseconds. `inside` is the name of the span that contains it, if any."""

    name: str
    start: int
    end: int
    category: str
    args: Mapping[str, Any]
    inside: str = ""


@dataclass
class _Track:
    """A track of spans that do not overlap, unless one contains the other."""

    spans: list[_Span] = field(default_factory=list)
    end: int = 0

    def holds_whole_of(self, span: _Span) -> bool:
        whole = next((each for each in reversed(self.spans) if each.name == span.inside), None)
        after_its_last_part = all(each.end <= span.start for each in self.spans if each.inside == span.inside)
        return (whole is not None and whole.start <= span.start and span.end <= whole.end) and after_its_last_part

    def add(self, span: _Span) -> None:
        self.spans.append(span)
        self.end = max(self.end, span.end)


def chrome_trace(startup: Mapping[str, Any], pid: int) -> dict[str, Any]:
    """Returns the trace in the JSON object format, made from the body of `/startup` with the same times.

    Phases that ran at the same time are on different tracks. The warm-up of a bucket is within its phase, or after
    the start if it was put off, as in an eager start on a GPU. A phase that still runs ends at the moment of the
    report.
    """
    tracks = _tracks([*_phases(startup), *_warmups(startup)])
    return {
        "traceEvents": [
            _name("process_name", pid, _MARKS_TRACK, "snapcap"),
            # Perfetto shows the number of a track behind its name.
            *(_name("thread_name", pid, tid, "start") for tid, _ in enumerate(tracks, 1)),
            *(_instant(name, _us(seconds), pid) for name, seconds in startup["marks"].items()),
            *(_complete(span, pid, tid) for tid, track in enumerate(tracks, 1) for span in track.spans),
        ],
        "displayTimeUnit": "ms",
        "otherData": {name: startup[name] for name in ("state", "model", "tier", "device", "dtype")},
    }


def _phases(startup: Mapping[str, Any]) -> list[_Span]:
    return [
        _Span(
            phase["name"],
            _us(phase["start"]),
            _us(startup["now"] if phase["end"] is None else phase["end"]),
            "phase",
            {"running": True} if phase["end"] is None else {},
        )
        for phase in startup["phases"]
    ]


def _warmups(startup: Mapping[str, Any]) -> list[_Span]:
    return [
        _Span(
            f"{bucket['component']} {bucket['size']}",
            _us(bucket["start"]),
            _us(bucket["start"] + bucket["seconds"]),
            "warm-up",
            {"bucket": bucket["size"], "backend": bucket["backend"], "state": bucket["state"]},
            inside=f"warm_{bucket['component']}",
        )
        for bucket in startup["buckets"]
        if bucket["start"] is not None
    ]


def _tracks(spans: Iterable[_Span]) -> list[_Track]:
    """Puts each span on the free track that was busy last, so that consecutive spans of a thread share a track."""
    tracks: list[_Track] = []
    for span in sorted(spans, key=lambda each: (each.start, each.inside != "", -each.end)):
        whole = [track for track in tracks if track.holds_whole_of(span)]
        free = whole or sorted((track for track in tracks if track.end <= span.start), key=lambda track: track.end)
        if not free:
            tracks.append(_Track())
        (free or tracks)[-1].add(span)
    return tracks


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _instant(name: str, ts: int, pid: int) -> dict[str, Any]:
    return {"name": name, "ph": "i", "s": "p", "cat": "mark", "ts": ts, "pid": pid, "tid": _MARKS_TRACK, "args": {}}


def _complete(span: _Span, pid: int, tid: int) -> dict[str, Any]:
    return {
        "name": span.name,
        "ph": "X",
        "cat": span.category,
        "ts": span.start,
        "dur": span.end - span.start,
        "pid": pid,
        "tid": tid,
        "args": dict(span.args),
    }
