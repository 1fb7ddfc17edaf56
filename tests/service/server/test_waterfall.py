"""The picture of a start: bars on one scale, nothing beyond the edges."""

from snapcap.service.server.start_result import waterfall
from snapcap.warmup.progress.timeline import Phase


def bars(phases: list[Phase], total: float) -> list[str]:
    return [line.split("│")[1] for line in waterfall(phases, total).splitlines()]


def test_bars_stand_where_the_phases_were() -> None:
    first, second = bars([Phase("a", 0.0, 1.0), Phase("longer", 1.0, 2.0)], 2.0)
    half = len(first) // 2
    assert first == "█" * half + " " * half
    assert second == " " * half + "█" * half


def test_overlapping_phases_overlap_in_the_picture() -> None:
    first, second = bars([Phase("a", 0.0, 1.5), Phase("b", 0.5, 2.0)], 2.0)
    assert any(one == two == "█" for one, two in zip(first, second, strict=True))


def test_an_instant_is_still_seen_and_a_running_phase_ends_at_the_edge() -> None:
    instant, running = bars([Phase("a", 2.0, 2.0), Phase("b", 1.0, None)], 2.0)
    assert instant.count("█") == 1
    assert running.endswith("█")
    assert len(instant) == len(running)


def test_no_phases_no_lines() -> None:
    assert waterfall([], 1.0) == ""
