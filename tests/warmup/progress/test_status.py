"""What the start has reached, as /startup and the metrics read it."""

import pytest

from snapcap.warmup.artifacts.fetch import Artifacts, Fetched
from snapcap.warmup.progress.status import BucketStatus, StartupStatus


@pytest.fixture
def status() -> StartupStatus:
    status = StartupStatus()
    status.expect((1, 4), "cpu", "float32")
    return status


def test_before_the_start_nothing_is_known() -> None:
    status = StartupStatus()
    assert status.buckets() == []
    assert (status.backend, status.state.tier, status.state.error, status.state.fetch) == (None, None, None, None)
    assert status.to_dict()["device"] is None


def test_expected_buckets_are_pending_encoder_first(status: StartupStatus) -> None:
    assert [(b.component, b.size, b.state, b.seconds) for b in status.buckets()] == [
        ("encoder", 1, "pending", None),
        ("encoder", 4, "pending", None),
        ("decoder", 1, "pending", None),
        ("decoder", 4, "pending", None),
    ]
    assert status.backend is None


def test_a_step_bucket_is_expected_of_the_decoder_alone() -> None:
    status = StartupStatus()
    status.expect((1, 4), "cpu", "float32", (2, 8))
    found = [(bucket.component, bucket.size) for bucket in status.buckets()]
    assert found == [("encoder", 1), ("encoder", 4), *(("decoder", size) for size in (1, 2, 4, 8))]


def test_an_update_keeps_the_warm_up_that_it_does_not_name(status: StartupStatus) -> None:
    status.update("decoder", 4, "eager", "eager", 0.5, 1.25)
    status.update("decoder", 4, "warm", "aot")
    assert status.bucket("decoder", 4) == BucketStatus("decoder", 4, "warm", "aot", 0.5, 1.25)
    assert status.decoder_backend(4) == "aot"


def test_the_backend_is_mixed_where_buckets_differ_and_pending_ones_do_not_count(status: StartupStatus) -> None:
    status.update("encoder", 1, "eager", "eager")
    status.update("encoder", 4, "pending", "aot")
    assert status.backend == "eager"
    status.update("encoder", 4, "warm", "aot")
    assert status.backend == "mixed"
    status.update("encoder", 1, "warm", "aot")
    assert status.backend == "aot"


def test_the_tier_is_the_backend_at_the_end_of_the_start(status: StartupStatus) -> None:
    for bucket in status.buckets():
        status.update(bucket.component, bucket.size, "eager", "eager")
    assert status.state.tier is None
    status.started()
    for bucket in status.buckets():
        status.update(bucket.component, bucket.size, "warm", "aot")
    assert (status.state.tier, status.backend) == ("eager", "aot")


def test_counters_add_up_by_label(status: StartupStatus) -> None:
    status.swapped("swapped")
    status.swapped("swapped")
    status.swapped("mismatch")
    status.count("artifact_publish", "exists")
    status.count("eager_fallbacks", "decoder_block", "4")
    status.count("eager_fallbacks", "decoder_block", "4")
    for state in ("waiting", "building", "failed"):
        status.building(state=state)
    assert status.counts("eager_fallbacks") == {("decoder_block", "4"): 2}
    assert status.counts("bucket_swaps") == {("swapped",): 2, ("mismatch",): 1}
    assert status.counts("artifact_publish") == {("exists",): 1}
    assert status.counts("builds") == {("failed",): 1}
    assert status.counts("artifact_requests") == {}


def test_a_fetch_is_counted_by_kind_and_result(status: StartupStatus) -> None:
    status.fetched(Artifacts("k" * 64, {"kind": "aot"}, Fetched("miss", "nothing was published")))
    assert status.counts("artifact_requests") == {("aot", "miss"): 1}
    assert status.to_dict()["artifacts"]["reason"] == "nothing was published"


def test_the_dictionary_has_what_was_reported(status: StartupStatus) -> None:
    status.building(state="building", done=1)
    status.building(done=2)
    status.fail("no such folder")
    body = status.to_dict()
    assert body["build"] == {"state": "building", "done": 2}
    assert (body["device"], body["dtype"], body["error"]) == ("cpu", "float32", "no such folder")
    assert body["buckets"][0] == {
        "component": "encoder",
        "size": 1,
        "state": "pending",
        "backend": "",
        "seconds": None,
        "start": None,
    }
