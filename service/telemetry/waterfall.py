"""Draws the start as a picture of text, for a server that was started by hand."""

from collections.abc import Sequence

from snapcap.warmup.progress.timeline import Phase

_BAR = 48


def waterfall(phases: Sequence[Phase], total: float) -> str:
    """One line a phase: its bar on the scale of the whole start, when it began and how long it took.

    Args:
        phases: in the order in which they began; one that still runs ends with the picture.
        total: seconds from exec until ready; the right edge.
    """
    width = max((len(phase.name) for phase in phases), default=0)
    return "\n".join(_line(phase, total, width) for phase in phases)


def _line(phase: Phase, total: float, width: int) -> str:
    end = total if phase.end is None else min(phase.end, total)
    first = min(int(phase.start / total * _BAR), _BAR - 1)
    last = max(int(end / total * _BAR), first + 1)
    bar = " " * first + "█" * (last - first) + " " * (_BAR - last)
    return f"  {phase.name:<{width}} │{bar}│ {phase.start:6.3f} s  {1000 * (end - phase.start):7.1f} ms"
