"""What the two processes say to each other arrives as it was sent, however the bytes are cut."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapcap.service.engine.remote.messages import (
    ArtifactsFound,
    Beat,
    Cancel,
    CheckpointFound,
    Failed,
    Message,
    ModelLoaded,
    Pulse,
    Ready,
    Rehearsed,
    Submit,
    Turn,
    Usage,
)
from snapcap.service.engine.request import Completion, Limits
from snapcap.service.errors import (
    BeamsNotReady,
    DeadlineExceeded,
    EngineFailed,
    ModelNotFound,
    NotReady,
    ServiceError,
)
from snapcap.service.ipc.framing import Unpacker, pack
from snapcap.service.telemetry.work import Batch, Work
from snapcap.warmup.progress.status import CacheCounts, CompilerCounts, StartupStatus, StatusState
from snapcap.warmup.progress.timeline import Phase
from snapcap.warmup.runtime.slot_request import SamplingParams

numbers = st.integers(0, 2**63)
small = st.integers(0, 2**31)
seconds = st.floats(0, 1e9)
tokens = st.lists(small, max_size=40).map(tuple)
params = st.builds(
    SamplingParams,
    max_new_tokens=st.none() | small,
    temperature=seconds,
    top_p=seconds,
    seed=st.none() | st.integers(),
    num_beams=small,
    early_stopping=st.booleans() | st.just("never"),
)
completions = st.builds(
    Completion, tokens, st.sampled_from(("stop", "length")), st.text(), seconds, seconds, seconds
)
batches = st.builds(Batch, small, small, seconds)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Submit, numbers, st.text(), small, tokens, params, seconds, st.booleans()),
    st.builds(Cancel, numbers),
    st.builds(Rehearsed),
    st.builds(CheckpointFound, st.text(min_size=1).map(Path)),
    st.builds(ArtifactsFound, st.none() | st.binary()),
    st.builds(ModelLoaded, st.builds(Limits, small, small, st.frozensets(small), small), st.booleans()),
    st.builds(Phase, st.text(), seconds, st.none() | seconds),
    st.builds(Usage, numbers, st.builds(CompilerCounts, small, st.builds(CacheCounts, small, small, small))),
    st.builds(Ready),
    st.builds(Failed, st.text()),
    st.builds(
        Turn,
        st.lists(numbers),
        st.lists(st.builds(Work, batches, st.lists(batches, max_size=3), st.lists(seconds), small), max_size=3),
        st.lists(st.tuples(numbers, small)),
        st.lists(st.tuples(numbers, completions), max_size=3),
        st.just([]),  # errors, which are no values: see below
    ),
    st.builds(Beat),
    st.builds(Pulse, numbers, numbers, st.text()),
)


@given(st.lists(messages, max_size=6), st.lists(st.integers(1, 300), max_size=20))
def test_messages_arrive_as_they_were_sent_however_the_bytes_are_cut(sent: list[Message], cuts: list[int]) -> None:
    data, unpacker, arrived = b"".join(pack(message) for message in sent), Unpacker(), []
    for size in cuts:
        arrived += unpacker.feed(data[:size])
        data = data[size:]
    arrived += unpacker.feed(data)
    assert arrived == sent
    assert [type(message) for message in arrived] == [type(message) for message in sent]


@pytest.mark.parametrize(
    "error",
    [DeadlineExceeded(), EngineFailed(), NotReady("failed", 3.0), BeamsNotReady(8, 4), ModelNotFound("a", "b")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_as_it_was_sent(error: ServiceError) -> None:
    (turn,) = Unpacker[Turn]().feed(pack(Turn.of(failed=[(7, error)])))
    ((number, arrived),) = turn.failed
    assert (number, type(arrived), str(arrived)) == (7, type(error), str(error))
    assert (vars(arrived), arrived.headers()) == (vars(error), error.headers())


def test_a_status_becomes_what_it_is_told() -> None:
    """All that `/startup` and the metrics read from it."""
    status, other, unpacker = StartupStatus(), StartupStatus(), Unpacker()

    def tell(state: StatusState) -> None:
        for each in unpacker.feed(pack(state)):
            assert isinstance(each, StatusState)
            other.restore(each)

    status.listen(tell)
    status.expect((1, 4), "cpu", "float32")
    status.update("encoder", 1, "warm", "aot", 0.5, 1.0)
    status.swapped("swapped")
    status.count("eager_fallbacks", "decoder.block", "4")
    status.building(state="building", done=1)
    status.count("artifact_publish", "published")
    status.started()
    status.fail("the disk is full")
    assert other.to_dict() == status.to_dict()
    for name in ("bucket_swaps", "eager_fallbacks", "artifact_publish"):
        assert other.counts(name) == status.counts(name) != {}


def test_what_another_process_compiled_is_counted_as_ours() -> None:
    status = StartupStatus()
    status.compiled_elsewhere(CompilerCounts(3, CacheCounts(1, 2, 3)))
    status.started()
    status.compiled_elsewhere(CompilerCounts(5))
    assert status.compile_events() == {"startup": 3, "serving": 2}
    assert status.compiler().caches == CacheCounts()
