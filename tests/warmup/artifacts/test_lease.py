"""The lease: one builder of many, and another one when that one dies."""

import json
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.lease import CLOCK_SKEW, Held, Lease, acquire
from snapcap.warmup.artifacts.remote import S3Store
from snapcap.warmup.artifacts.store import ArtifactStore, StoreError, lease_name

KEY = "c" * 64


class Clock:
    """Seconds since the epoch, as the test likes."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def taken(store: ArtifactStore, owner: str, clock: Any = time.time, ttl: float = 60) -> Lease:
    lease = acquire(store, KEY, ttl, owner, clock)
    assert isinstance(lease, Lease)
    return lease


def test_one_of_eight_builds(store: ArtifactStore) -> None:
    barrier = threading.Barrier(8)

    def start(index: int) -> Lease | Held:
        barrier.wait(60)
        return acquire(store, KEY, 60, f"server-{index}")

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(start, range(8)))
    winners = [result for result in results if isinstance(result, Lease)]
    assert len(winners) == 1
    assert winners[0].exclusive
    losers = [result for result in results if isinstance(result, Held)]
    assert {held.owner for held in losers} == {winners[0].owner}
    assert all(60 < held.remaining <= 60 + CLOCK_SKEW for held in losers)


def test_a_released_lease_is_free(store: ArtifactStore) -> None:
    taken(store, "a").release()
    assert store.read(lease_name(KEY), 100) is None
    taken(store, "b")


def test_an_expired_lease_is_taken_over_once(store: ArtifactStore) -> None:
    clock = Clock()
    lost = taken(store, "killed", clock)
    clock.now += 60 + CLOCK_SKEW - 1
    assert acquire(store, KEY, 60, "early", clock) == Held("killed", pytest.approx(1))
    clock.now += 2
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda index: acquire(store, KEY, 60, f"next-{index}", clock), range(4)))
    winners = [result for result in results if isinstance(result, Lease)]
    assert len(winners) == 1
    assert not lost.renew()
    lost.release()  # of what is not ours any more: changes nothing
    assert acquire(store, KEY, 60, "late", clock) == Held(winners[0].owner, 60 + CLOCK_SKEW)


def test_a_renewed_lease_lasts(store: ArtifactStore) -> None:
    clock = Clock()
    lease = taken(store, "a", clock)
    for _ in range(3):
        clock.now += 50
        assert lease.renew()
    assert acquire(store, KEY, 60, "b", clock) == Held("a", 60 + CLOCK_SKEW)


def test_it_is_renewed_while_the_block_runs(store: ArtifactStore) -> None:
    lease = taken(store, "a", ttl=0.3)
    first = store.read(lease_name(KEY), 1000)
    assert first is not None
    with lease.kept():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            now = store.read(lease_name(KEY), 1000)
            if now is not None and json.loads(now.data)["expires"] > json.loads(first.data)["expires"]:
                break
        else:
            pytest.fail("never renewed")
    assert store.read(lease_name(KEY), 1000) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b"\xff",
        b'{"owner": "x"}',
        b'{"owner": 1, "expires": 1e300, "ttl": 1e300}',
        b'{"owner": "x", "expires": true, "ttl": 60}',
        b'{"owner": "x", "expires": NaN, "ttl": 60}',
        b'{"owner": "x", "expires": 1e300, "ttl": 60}',  # of a clock that is far ahead
        b'{"owner": "x", "expires": 1e300, "ttl": 1e300}',  # of somebody who would hold all others up for ever
        b'{"owner": "x", "expires": 4000000000, "ttl": 4000000000}',
        b'{"owner": "x", "expires": %s, "ttl": %s}' % (b"9" * 1000, b"9" * 1000),
        b"[" * 4000,
    ],
)
def test_a_lease_that_makes_no_sense_is_taken_over(local: FolderStore, content: bytes) -> None:
    local.write(lease_name(KEY), content)
    taken(local, "b")


def test_a_lost_answer_is_not_a_lost_lease(s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try arrives and its answer does not; the retry is refused by our own lease."""
    assert s3_store.is_conditional()
    real = s3_store.s3.put_object

    def twice(**request: Any) -> Any:
        real(**request)
        return real(**request)

    monkeypatch.setattr(s3_store.s3, "put_object", twice)
    lease = taken(s3_store, "a")
    assert lease.renew()
    assert lease.renew()
    lease.release()
    assert s3_store.read(lease_name(KEY), 100) is None


def test_without_conditional_writes_everybody_builds(s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = s3_store.s3.put_object
    monkeypatch.setattr(
        s3_store.s3,
        "put_object",
        lambda IfNoneMatch="", IfMatch="", **request: real(**request),  # noqa: N803
    )
    leases = [taken(s3_store, owner) for owner in "ab"]
    assert not any(lease.exclusive for lease in leases)
    for lease in leases:
        with lease.kept():
            assert lease.renew()
    assert s3_store.newest("leases", 10) == []


def test_a_store_that_fails_meanwhile_does_not_stop_the_build(
    local: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = taken(local, "a", ttl=0.03)
    tried = threading.Event()

    def fail(*args: Any, **options: Any) -> None:
        tried.set()
        raise StoreError("down")

    monkeypatch.setattr(FolderStore, "write", fail)
    with lease.kept():
        assert tried.wait(60)


def test_owners_differ_and_keys_do_not_meet(local: FolderStore) -> None:
    ours = acquire(local, KEY, 60)
    other = acquire(local, "d" * 64, 60)
    assert isinstance(ours, Lease)
    assert isinstance(other, Lease)
    assert ours.owner != other.owner


def _build(root: Path, started: Any) -> None:
    lease = acquire(FolderStore.open(root), KEY, 0.2, "builder")
    assert isinstance(lease, Lease)
    with lease.kept():
        started.set()
        threading.Event().wait()


def test_a_killed_builder_is_replaced(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    builder = context.Process(target=_build, args=(tmp_path / "store", started))
    builder.start()
    assert started.wait(60)
    store = FolderStore.open(tmp_path / "store")
    assert isinstance(acquire(store, KEY, 60, "next"), Held)
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    assert isinstance(acquire(store, KEY, 60, "next"), Held)  # it may still be alive, as far as anybody knows
    later = time.time() + 0.2 + CLOCK_SKEW
    taken(store, "next", lambda: later)
