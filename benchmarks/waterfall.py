"""Cuts starts into phases, and draws them as bars, the picture of `--png`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from snapcap.warmup.progress.timeline import BESIDE

HTTP, WAIT, CAPTION = "http", "other", "first_caption"
MISSING = "a picture needs matplotlib: pip install 'snapcap[bench]'"
# A phase has a label if it is at least this share of the longest start.
LABEL_SHARE = 0.05
DPI = 150


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


class ChartsError(RuntimeError):
    """matplotlib is not installed. The message says how to install it."""


@dataclass(frozen=True)
class Bar:
    """A start: its phases, the moment of READY if known, and the number of starts of which it is the median."""

    title: str
    segments: Sequence[Segment]
    ready: float | None
    runs: int


def require_matplotlib() -> Any:
    """Returns pyplot, set to draw into files.

    Raises:
        ChartsError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ChartsError(MISSING) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_waterfall(bars: Sequence[Bar], file: Path, title: str) -> None:
    """Draws horizontal bars over seconds since exec, with a colour for each phase and a mark at READY."""
    pyplot = require_matplotlib()
    figure, axis = pyplot.subplots(figsize=(11, 2.0 + 0.42 * len(bars)), layout="constrained")
    colours = _colours(pyplot, [segment.name for bar in bars for segment in bar.segments])
    longest = max(bar.segments[-1].end for bar in bars)
    for row, bar in enumerate(bars):
        for segment in bar.segments:
            axis.barh(row, segment.seconds, left=segment.start, height=0.7, color=colours[segment.name])
            if segment.seconds >= LABEL_SHARE * longest:
                middle = segment.start + segment.seconds / 2
                axis.text(middle, row, f"{segment.seconds:.2f}", ha="center", va="center", fontsize=7)
        if bar.ready is not None:
            axis.plot(bar.ready, row - 0.42, marker="v", color="black", markersize=5)
        end = bar.segments[-1].end
        axis.text(end, row, f" {end:.2f} s", ha="left", va="center", fontsize=8, fontweight="bold")
    axis.set_yticks(range(len(bars)), [f"{bar.title} (n={bar.runs})" for bar in bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, longest * 1.1)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.3)
    axis.set_title(f"Cold start: {title}", fontsize=10, loc="left")
    axis.set_xlabel("seconds since exec; ▾ READY; the end of a bar is the first caption")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(handles, colours, loc="outside lower center", ncols=6, fontsize=7, frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI)
    pyplot.close(figure)


def _colours(pyplot: Any, names: Sequence[str]) -> Mapping[str, Any]:
    """Returns a colour for each phase, which is the same in every bar."""
    distinct = list(dict.fromkeys(names))
    palette = pyplot.get_cmap("tab20").colors + pyplot.get_cmap("tab20b").colors
    return {name: palette[index % len(palette)] for index, name in enumerate(distinct)}
