"""Phases and moments of the start, counted from the process's exec."""

import subprocess
import sys
import threading
import time

import pytest

from snapcap.warmup.progress.timeline import PHASES, Phase, Timeline


@pytest.fixture
def timeline() -> Timeline:
    return Timeline(time.monotonic())


def test_a_phase_runs_and_ends(timeline: Timeline) -> None:
    with timeline.phase("bind"):
        (running,) = timeline.phases()
        assert (running.name, running.end, timeline.current()) == ("bind", None, "bind")
    (ended,) = timeline.phases()
    assert ended.end is not None
    assert 0 <= ended.start <= ended.end <= timeline.now()
    assert timeline.current() is None


def test_a_phase_that_raises_ends_too(timeline: Timeline) -> None:
    with pytest.raises(KeyError), timeline.phase("load_weights"):
        raise KeyError
    assert timeline.phases()[0].end is not None
    assert timeline.current() is None


def test_overlapping_phases_of_two_threads_keep_their_own_times(timeline: Timeline) -> None:
    entered, leave = threading.Event(), threading.Event()

    def fetch() -> None:
        with timeline.phase("fetch_weights"):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=fetch)
    with timeline.phase("import_torch"):
        thread.start()
        assert entered.wait(30)
        assert timeline.current() == "fetch_weights"  # the one that began last
    assert timeline.current() == "fetch_weights"
    leave.set()
    thread.join()
    outer, inner = timeline.phases()
    assert (outer.name, inner.name) == ("import_torch", "fetch_weights")
    assert outer.end is not None
    assert inner.end is not None
    assert outer.start <= inner.start <= outer.end <= inner.end


def test_phases_are_in_the_order_in_which_they_began(timeline: Timeline) -> None:
    timeline.add(Phase("bind", 2.0, 3.0))
    timeline.add(Phase("interpreter", 0.0, 2.0))
    assert [phase.name for phase in timeline.phases()] == ["interpreter", "bind"]


def test_only_the_first_mark_of_a_name_counts(timeline: Timeline) -> None:
    timeline.mark("live")
    first = timeline.marks()
    time.sleep(0.001)
    timeline.mark("live")
    timeline.mark("ready")
    assert timeline.marks()["live"] == first["live"]
    assert timeline.marks()["ready"] > first["live"]


def test_marks_and_phases_are_copies(timeline: Timeline) -> None:
    timeline.marks()["live"] = 1.0
    timeline.phases().append(Phase("bind", 0.0))
    assert timeline.marks() == {}
    assert timeline.phases() == []


def test_a_listener_hears_of_each_phase_as_it_begins_and_ends_also_of_earlier_ones(timeline: Timeline) -> None:
    heard: list[Phase] = []
    with timeline.phase("interpreter"):
        pass
    with timeline.phase("bind"):
        timeline.listen(heard.append)
        assert [(phase.name, phase.end is None) for phase in heard] == [("interpreter", False), ("bind", True)]
    with timeline.phase("import_torch"):
        pass
    ended = [phase.name for phase in heard if phase.end is not None]
    assert ended == ["interpreter", "bind", "import_torch"]
    assert len(heard) == 5


def test_a_timeline_that_is_told_all_that_another_hears_is_its_equal(timeline: Timeline) -> None:
    other = Timeline(timeline.origin)
    with timeline.phase("bind"):
        timeline.listen(other.add)
        assert other.current() == "bind"
        with timeline.phase("import_torch"):
            assert other.current() == "import_torch"
    with timeline.phase("import_torch"):  # again
        assert other.phases() == timeline.phases()
    assert other.phases() == timeline.phases()
    assert other.current() is None


def test_a_timeline_of_this_process_begins_with_the_interpreter() -> None:
    timeline = Timeline.since_exec()
    (phase,) = timeline.phases()
    assert (phase.name, phase.start) == (PHASES[0], 0.0)
    assert phase.end is not None
    assert 0 < phase.end <= timeline.now()


def test_the_clock_begins_when_the_process_was_executed() -> None:
    code = (
        "from snapcap.warmup.progress.timeline import Timeline; import time\n"
        "print(Timeline.since_exec().now(), time.monotonic())"
    )
    before = time.monotonic()
    reply = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    age, at = map(float, reply.stdout.split())
    exec_at = at - age
    # The kernel counts ticks of 10 ms, which may begin before the clock was read here.
    assert before - 0.02 <= exec_at < at
