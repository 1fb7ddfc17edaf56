"""The fixtures can fail: a server that stops for a moment, that keeps memory, or loses a place, is found out."""

import time
from contextlib import ExitStack

import pytest
from support.attacks.abuse import MEMORY_SLACK, Abused
from support.attacks.full_capacity import ask, check, full_capacity, stopped


def test_a_quiet_server_withstands_nothing(abused: Abused) -> None:
    damage = abused.withstands(lambda: time.sleep(0.5))
    assert damage.window.livez.count > 2
    assert damage.window.failed == 0
    assert damage.before > 50 << 20


def test_a_server_that_stops_is_found_out(abused: Abused) -> None:
    allowed = abused.suffer(lambda: time.sleep(0.5), MEMORY_SLACK).allowed  # more where other work stretches ours

    def is_found_out(seconds: float) -> bool:
        def stop() -> None:
            with stopped(abused.server.process.pid):
                time.sleep(seconds)

        try:
            abused.withstands(stop)
        except AssertionError as error:
            return "/livez worst" in str(error)
        return False

    assert any(is_found_out(factor * allowed) for factor in (2, 4, 8))  # other work may stretch ours even more


def test_a_place_that_is_taken_is_found_out(abused: Abused) -> None:
    """A request that nobody asked about holds a place of the queue, as one that is lost would."""
    with ExitStack() as exits:
        with stopped(abused.server.engine_pid):
            waiting = ask(abused.server, exits, abused.samples, 1)
            abused.server.wait_for(lambda: abused.server.metrics()["snapcap_queue_depth"] == 1, 30)
            with pytest.raises(AssertionError, match="not within"):
                full_capacity(abused.server, abused.samples, patience=1)
        check(waiting)
