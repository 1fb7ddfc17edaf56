"""More rows run together than are encoded at once, where buckets of decode steps alone are ready."""

import pytest
from support.fakes.list_engine import Served, result
from support.fakes.scheduling import EOS, LIMITS, Clock, advance, request, submit

from snapcap.service.engine.scheduler import Scheduler
from snapcap.service.errors import BeamsNotReady
from snapcap.warmup.plan.plan import BucketTable


@pytest.fixture
def scheduler(clock: Clock) -> Scheduler:
    """Encodes of 1 and 4; steps of 1 and 4 are ready, 8 and 16 are to follow."""
    return Scheduler(BucketTable.of((1, 4)), LIMITS, clock, cold=(8, 16), steps_alone=(8, 16))


def admitted(scheduler: Scheduler) -> int:
    return len(scheduler.admit())


def test_a_warm_step_bucket_gives_slots_and_no_larger_encodes(scheduler: Scheduler) -> None:
    submit(scheduler, *(request(number) for number in range(20)))
    assert [admitted(scheduler), admitted(scheduler)] == [4, 0]
    scheduler.warmed(8)
    assert (scheduler.step_table.sizes, scheduler.encode_table.sizes) == ((1, 4, 8), (1, 4))
    assert [admitted(scheduler), admitted(scheduler)] == [4, 0]
    scheduler.warmed(16)
    assert [admitted(scheduler) for _ in range(3)] == [4, 4, 0]
    assert len(scheduler.running) == 16


def test_a_step_bucket_that_is_ready_from_the_start_encodes_nothing() -> None:
    scheduler = Scheduler(BucketTable.of((1, 4, 8)), LIMITS, steps_alone=(8,))
    submit(scheduler, *(request(number) for number in range(9)))
    assert [admitted(scheduler) for _ in range(3)] == [4, 4, 0]


def test_free_slots_wait_until_an_encode_is_full(scheduler: Scheduler) -> None:
    """The largest encode fills a quarter of the slots, so as many must be free."""
    scheduler.warmed(16)
    submit(scheduler, *(request(number) for number in range(30)))
    assert [admitted(scheduler) for _ in range(4)] == [4] * 4
    given = []
    for _ in range(5):
        rows = scheduler.launched()
        advance(scheduler, rows, [EOS] + [7] * (len(rows) - 1), "eager")
        given.append(admitted(scheduler))
    assert given == [0, 0, 0, 4, 0]


def test_a_search_may_have_as_many_beams_as_a_step_bucket_has_rows(scheduler: Scheduler) -> None:
    eight, six = request("eight", num_beams=8), request("six", num_beams=6)
    submit(scheduler, eight, six, request("one"))
    assert admitted(scheduler) == 1  # the searches stand aside
    advance(scheduler, scheduler.launched(), [EOS], "eager")
    scheduler.warmed(8)
    assert admitted(scheduler) == 1
    assert (len(scheduler.running), scheduler.running[0].request.id) == (8, "eight")
    assert scheduler.step_table.fit(8).size == 8


def test_a_step_bucket_that_is_given_up_refuses_only_who_needs_it(scheduler: Scheduler) -> None:
    search, small = request("search", num_beams=6), request("small", num_beams=4)
    submit(scheduler, search, small)
    scheduler.give_up(8)
    assert not search.future.done()
    scheduler.give_up(16)
    assert isinstance(search.future.exception(0), BeamsNotReady)
    assert admitted(scheduler) == 1
    assert scheduler.encode_table.sizes == (1, 4)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_crowd_is_encoded_in_parts_and_decoded_together(runs_ahead: bool) -> None:
    served = Served(runs_ahead, steps_alone=(8,))
    release = served.hold()
    crowd = [served.send(image) for image in range(1, 21)]
    release.set()
    for image, sent in enumerate(crowd, 1):
        assert result(sent).tokens == tuple(range(100 * image, 100 * image + 5))
    assert max(images for _, images in served.runner.encoded) == 4
    assert {bucket for bucket, _ in served.runner.encoded} <= {1, 4}
    assert max(rows for bucket, rows in served.observer.steps if bucket == 8) == 8
    served.engine.stop()
    served.outcome.result(30)
