"""A start cut into stretches: whatever overlapped, they follow each other and sum to the total."""

import random
from itertools import pairwise
from typing import Any

import pytest

from snapcap.benchmarks.startup import Segment, from_marks, from_startup, seconds_by_name
from snapcap.warmup.progress.timeline import PHASES


def startup(*phases: tuple[str, float, float | None], **marks: float) -> dict[str, Any]:
    return {
        "phases": [{"name": name, "start": start, "end": end} for name, start, end in phases],
        "marks": marks,
    }


def check_partition(segments: list[Segment], total: float) -> None:
    assert (segments[0].start, segments[-1].end) == (0.0, total)
    assert all(left.end == right.start for left, right in pairwise(segments))
    assert all(segment.seconds > 0 for segment in segments)
    assert sum(seconds_by_name(segments).values()) == pytest.approx(total)


def test_what_ran_beside_something_else_is_not_counted() -> None:
    segments = from_startup(
        startup(
            ("interpreter", 0.0, 0.1),
            ("fetch_weights", 0.4, 0.9),
            ("import_torch", 0.5, 0.8),
            ("device_init", 1.0, 1.1),
            live=0.4,
            ready=1.2,
        ),
        1.5,
    )
    check_partition(segments, 1.5)
    assert [(segment.name, round(segment.seconds, 3)) for segment in segments] == [
        ("interpreter", 0.1),
        ("http", 0.3),
        ("fetch_weights", 0.1),
        ("import_torch", 0.3),
        ("fetch_weights", 0.1),
        ("other", 0.1),
        ("device_init", 0.1),
        ("other", 0.1),
        ("first_caption", 0.3),
    ]


def test_a_phase_that_still_runs_ends_with_the_total() -> None:
    segments = from_startup(startup(("interpreter", 0.0, 0.1), ("warm_encoder", 0.1, None), live=0.1), 2.0)
    assert [segment.name for segment in segments] == ["interpreter", "warm_encoder"]
    check_partition(segments, 2.0)


def test_phases_later_than_the_total_are_cut() -> None:
    segments = from_startup(startup(("import_torch", 0.5, 9.0), ("self_test", 9.0, 9.5), live=0.2, ready=9.5), 3.0)
    check_partition(segments, 3.0)
    assert "self_test" not in seconds_by_name(segments)


@pytest.mark.parametrize("seed", range(20))
def test_any_phases_sum_to_the_total(seed: int) -> None:
    chooser = random.Random(seed)
    phases = []
    for name in PHASES:
        start = chooser.uniform(0, 2)
        phases.append((name, start, start + chooser.uniform(0, 1)))
    live = chooser.uniform(0, 1)
    total = chooser.uniform(1, 3)
    check_partition(from_startup(startup(*phases, live=live, ready=live + 1), total), total)


def test_marks_end_the_stretch_that_began_with_the_mark_before() -> None:
    marks = [(100.2, "interpreter"), (101.2, "import_torch"), (101.5, "load_model"), (101.7, "load_model")]
    segments = from_marks(marks, 100.0, 2.0, "first_caption")
    check_partition(segments, 2.0)
    assert {name: round(value, 3) for name, value in seconds_by_name(segments).items()} == {
        "interpreter": 0.2,
        "import_torch": 1.0,
        "load_model": 0.5,
        "first_caption": 0.3,
    }


def test_a_mark_after_the_total_and_one_before_the_spawn_are_cut() -> None:
    segments = from_marks([(99.0, "early"), (105.0, "late")], 100.0, 2.0, "rest")
    assert [(segment.name, segment.seconds) for segment in segments] == [("late", 2.0)]


def test_without_marks_everything_is_the_rest() -> None:
    assert from_marks([], 100.0, 2.0, "rest") == [Segment("rest", 0.0, 2.0)]
