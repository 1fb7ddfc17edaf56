import threading

from snapcap.service.readiness import Readiness, State


def make() -> Readiness:
    return Readiness(lambda: "import_torch")


def test_starts_unservable_and_names_the_running_phase() -> None:
    readiness = make()
    assert (readiness.state, readiness.servable, readiness.phase()) == (State.STARTING, False, "import_torch")


def test_ready_then_draining() -> None:
    readiness = make()
    assert readiness.ready()
    assert readiness.servable
    assert readiness.phase() == "ready"
    assert readiness.drain()
    assert not readiness.servable
    assert readiness.phase() == "draining"


def test_failure_keeps_its_sentence_and_may_drain() -> None:
    readiness = make()
    readiness.fail("config.json: no such file")
    assert (readiness.state, readiness.error) == (State.FAILED, "config.json: no such file")
    assert readiness.drain()


def test_no_state_comes_back() -> None:
    ready, failed = make(), make()
    assert ready.ready()
    assert not ready.ready()
    assert failed.fail("x")
    assert not failed.ready()
    assert not failed.fail("y")
    assert (failed.state, failed.error) == (State.FAILED, "x")


def test_a_drain_during_the_start_wins() -> None:
    readiness = make()
    assert readiness.drain()
    assert not readiness.ready()
    assert not readiness.fail("x")
    assert not readiness.drain()
    assert readiness.state is State.DRAINING


def test_one_of_many_threads_moves_it() -> None:
    readiness = make()
    barrier = threading.Barrier(8)
    moved: list[bool] = []

    def drain() -> None:
        barrier.wait()
        moved.append(readiness.drain())

    threads = [threading.Thread(target=drain) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(moved) == [False] * 7 + [True]
