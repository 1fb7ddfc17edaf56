"""An engine behind messages: the same replies, and one message a step."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.fakes.list_engine import LIMITS, PATIENCE, ListRunner, Observer, result

from snapcap.service.engine.engine import DeviceFailedError, Engine
from snapcap.service.engine.remote.client import RemoteEngine
from snapcap.service.engine.remote.messages import Cancel, Message, Submit, Turn
from snapcap.service.engine.remote.server import EngineServer
from snapcap.service.engine.request import CaptionRequest, Completion
from snapcap.service.engine.scheduler import Scheduler
from snapcap.service.errors import DeadlineExceeded, EngineFailed, NotReady
from snapcap.service.ipc.framing import Unpacker, pack
from snapcap.service.ipc.shared_pixels import SharedPixels, Slots
from snapcap.service.limits import EngineChannelFull
from snapcap.service.telemetry.work import Batch, Work
from snapcap.warmup.plan.plan import BucketTable
from snapcap.warmup.runtime.slot_request import SamplingParams

SLOTS = 3


def request(image: int, deadline: float = 1e12, **params: Any) -> CaptionRequest:
    pixels = np.full((2, 2, 3), image, dtype=np.uint8)
    return CaptionRequest(str(image), pixels, (), SamplingParams(**params), deadline, Future())


def turn(**changes: Any) -> Turn:
    return Turn.of()._replace(**changes)


class Filling(RemoteEngine):
    """Puts the pixels of each request into a free slot of `pixels`, as decoding does."""

    pixels: SharedPixels

    def submit(self, request: CaptionRequest) -> None:
        slot = self.slots.take()
        self.pixels.read(slot)[:] = request.array
        super().submit(replace(request, pixels=slot))


class Sent:
    """A remote engine whose messages go no further than here."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.pixels = SharedPixels(SLOTS + 1)
        self.pixels.open((2, 2))
        self.observer = Observer()
        self.slots = Slots(SLOTS + 1)
        self.engine = Filling(LIMITS, self.slots, self.messages.append, self.observer)
        self.engine.pixels = self.pixels

    def submit(self, image: int) -> tuple[CaptionRequest, Submit]:
        sent = request(image)
        self.engine.submit(sent)
        message = self.messages[-1]
        assert isinstance(message, Submit)
        return sent, message


@pytest.fixture
def sent() -> Sent:
    return Sent()


COMPLETION = Completion((7,), "stop", "aot", 0.1, 0.2, 0.3)


def test_a_request_is_a_message_and_its_pixels_are_in_shared_memory(sent: Sent) -> None:
    _, message = sent.submit(9)
    assert (message.request_id, message.streams, message.deadline) == ("9", False, 1e12)
    assert (sent.pixels.read(message.slot) == 9).all()
    assert len(pack(message)) < 1000


def test_what_a_turn_says_reaches_whom_it_is_for(sent: Sent) -> None:
    (first, a), (second, b), (third, c) = (sent.submit(image) for image in (1, 2, 3))
    sent.engine.take(
        turn(
            completed=[(b.number, COMPLETION)], failed=[(a.number, DeadlineExceeded()), (c.number, EngineFailed())]
        )
    )
    assert result(second) == COMPLETION
    assert isinstance(first.future.exception(0), DeadlineExceeded)
    assert isinstance(third.future.exception(0), EngineFailed)


def test_observations_are_handed_on(sent: Sent) -> None:
    sent.engine.take(turn(works=[Work(Batch(4, 3, 0.2), [Batch(4, 2, 0.1)], [0.5, 0.6], 5)]))
    seen = sent.observer
    assert (seen.waited, seen.encodes, seen.steps, seen.generated) == ([0.5, 0.6], [(4, 2)], [(4, 3)], 5)


def test_a_request_that_is_admitted_frees_its_slot_and_then_says_so(sent: Sent) -> None:
    free: list[int] = []
    waiting = replace(request(1), on_admitted=lambda: free.append(len(sent.slots)))
    sent.engine.submit(waiting)
    (message,) = sent.messages
    assert isinstance(message, Submit)
    assert (len(sent.slots), free) == (SLOTS, [])
    for _ in range(2):  # the second is for nobody
        sent.engine.take(turn(admitted=[message.number], completed=[(message.number, COMPLETION)]))
    assert free == [SLOTS + 1]
    assert sent.submit(9)[1].slot == message.slot


@pytest.mark.parametrize("how", ["completed", "failed", "cancelled"])
def test_a_request_that_ends_frees_its_slot_once(sent: Sent, how: str) -> None:
    waiting, message = sent.submit(1)
    if how == "cancelled":
        assert waiting.future.cancel()
        assert sent.messages[-1] == Cancel(message.number)
    else:
        value: Any = COMPLETION if how == "completed" else EngineFailed()
        sent.engine.take(turn(**{how: [(message.number, value)]}))
    assert len(sent.slots) == SLOTS + 1
    # The engine had already given the device the pixels, and says so now.
    sent.engine.take(turn(admitted=[message.number], completed=[(message.number, COMPLETION)]))
    assert len({sent.submit(image)[1].slot for image in range(SLOTS + 1)}) == SLOTS + 1


def test_a_result_that_arrives_after_its_client_has_left_goes_nowhere(sent: Sent) -> None:
    waiting, message = sent.submit(1)
    waiting.future.cancel()
    sent.engine.take(turn(completed=[(message.number, COMPLETION)], tokens=[(message.number, 3)]))
    assert waiting.future.cancelled()


def test_an_engine_that_has_ended_fails_what_was_sent_and_takes_nothing_more(sent: Sent) -> None:
    waiting, _ = sent.submit(1)
    sent.engine.fail()
    error = waiting.future.exception(0)
    assert isinstance(error, NotReady)  # to be sent again: 503 with Retry-After
    assert error.headers() == {"Retry-After": "1"}
    with pytest.raises(NotReady):
        sent.engine.submit(request(2))


def test_an_engine_that_does_not_read_is_sent_only_so_much(sent: Sent) -> None:
    """Clients that leave free their slots, and others come: their messages would pile up for ever."""
    room = [True]
    engine = Filling(LIMITS, sent.slots, sent.messages.append, sent.observer, lambda: room[0])
    engine.pixels = sent.pixels
    waiting = request(1)
    engine.submit(waiting)
    room[0] = False
    with pytest.raises(EngineChannelFull):
        engine.submit(request(2))
    assert len(sent.messages) == 1
    assert engine.waiting
    waiting.future.cancel()  # is told all the same
    assert len(sent.messages) == 2
    assert not engine.waiting


# --- with an engine behind it ---


class Behind:
    """The engine process's own parts over a runner of lists, and its socket as bytes from hand to hand."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.pixels = SharedPixels(16)
        self.pixels.open((2, 2))
        self.observer = Observer()
        self.remote = Filling(LIMITS, Slots(16), self._to_engine, self.observer)
        self.remote.pixels = self.pixels
        self.intake = EngineServer(self.pixels, self._to_http)
        table = BucketTable.of((1, 4, 8))
        self.runner = Images(table.largest.size)
        self.scheduler = Scheduler(table, LIMITS)
        turns = self.intake.turns
        self.engine = Engine(self.scheduler, turns.observe, turns.end)
        self.intake.attach(self.engine)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        runner: Any = self.runner
        with suppress(DeviceFailedError):
            self.engine.run(runner, lambda size: f"b{size}")

    def _to_engine(self, message: Message) -> None:
        for each in Unpacker().feed(pack(message)):
            if isinstance(each, Submit):
                self.intake.submit(each)
            elif isinstance(each, Cancel):
                self.intake.cancel(each.number)

    def _to_http(self, message: Message) -> None:
        (each,) = Unpacker().feed(pack(message))
        assert isinstance(each, Turn)
        self.turns.append(each)
        self.remote.take(each)

    def hold(self) -> threading.Event:
        reached, release = threading.Event(), threading.Event()
        self.engine.call(lambda: (reached.set(), release.wait(PATIENCE)))
        assert reached.wait(PATIENCE)
        return release


class Images(ListRunner):
    """Takes images as pixels, whose value is their number."""

    def encode(self, bucket: Any, images: Any, first_slot: int, rows: Any = ()) -> None:
        super().encode(bucket, [int(image[0, 0, 0]) for image in images], first_slot)


@pytest.fixture
def behind() -> Iterator[Behind]:
    behind = Behind()
    yield behind
    behind.engine.stop()
    behind.thread.join(PATIENCE)
    assert not behind.thread.is_alive()


def test_each_request_gets_the_tokens_of_its_own_pixels(behind: Behind) -> None:
    sent = [request(image, max_new_tokens=4) for image in range(1, 13)]
    for each in sent:
        behind.remote.submit(each)
    for image, each in enumerate(sent, start=1):
        assert result(each).tokens == tuple(range(100 * image, 100 * image + 4))
    assert not behind.remote.waiting
    assert len(behind.observer.waited) == 12
    assert behind.observer.generated == 48


def test_all_that_end_with_a_step_are_in_one_message(behind: Behind) -> None:
    release = behind.hold()
    sent = [request(image, max_new_tokens=3) for image in range(8)]
    for each in sent:
        behind.remote.submit(each)
    release.set()
    for each in sent:
        result(each)
    behind.hold().set()
    assert [len(each.completed) for each in behind.turns if each.completed] == [8]
    assert [len(each.admitted) for each in behind.turns if each.admitted] == [8]
    # Of three steps the first has the admission, and the second nothing that anybody waits for.
    assert [len(each.works) for each in behind.turns] == [1, 2]
    assert len(behind.observer.steps) == len(behind.runner.steps) == 3


def test_tokens_of_a_stream_come_with_their_steps(behind: Behind) -> None:
    tokens: list[int] = []
    streamed = request(2, max_new_tokens=3)
    object.__setattr__(streamed, "on_token", tokens.append)
    behind.remote.submit(streamed)
    assert result(streamed).tokens == tuple(tokens) == (200, 201, 202)
    assert [each.tokens[0][1] for each in behind.turns if each.tokens] == [200, 201, 202]


def test_a_request_that_is_cancelled_leaves_its_slot_in_the_engine(behind: Behind) -> None:
    reached, release = threading.Event(), threading.Event()

    def before_step() -> None:
        reached.set()
        release.wait(PATIENCE)

    behind.runner.before_step = before_step
    running = request(1, max_new_tokens=20)
    behind.remote.submit(running)
    assert reached.wait(PATIENCE)
    running.future.cancel()
    release.set()
    following = request(2, max_new_tokens=2)
    behind.remote.submit(following)
    assert result(following).tokens == (200, 201)
    behind.hold().set()
    assert behind.scheduler.running == []
    assert len(behind.runner.steps) < 20
    assert behind.intake._futures == {}


def test_a_deadline_passes_in_the_engine_too(behind: Behind) -> None:
    late = request(1, deadline=0.0)
    behind.remote.submit(late)
    assert isinstance(late.future.exception(PATIENCE), DeadlineExceeded)


def test_a_device_that_fails_for_good_fails_what_waits(behind: Behind) -> None:
    def broken() -> None:
        raise RuntimeError("no device")

    behind.runner.before_step = broken
    release = behind.hold()
    sent = [request(image) for image in range(12)]
    for each in sent:
        behind.remote.submit(each)
    release.set()
    assert all(isinstance(each.future.exception(PATIENCE), EngineFailed) for each in sent)
    last = request(1)  # those were in two batches; now it is the device that is at fault
    behind.remote.submit(last)
    assert isinstance(last.future.exception(PATIENCE), NotReady)
    behind.thread.join(PATIENCE)
    assert not behind.thread.is_alive()
    refused = request(1)
    behind.remote.submit(refused)
    assert isinstance(refused.future.exception(PATIENCE), NotReady)


@pytest.mark.parametrize("which", ["on_token", "on_admitted"])
def test_a_callback_that_raises_in_the_http_process_fails_its_request_alone(sent: Sent, which: str) -> None:
    def fail(*_: int) -> None:
        raise RuntimeError("the reply")

    callbacks: dict[str, Any] = {"on_token": fail, which: fail}
    odd = replace(request(1), **callbacks)
    sent.engine.submit(odd)
    (message,) = sent.messages
    assert isinstance(message, Submit)
    other, its = sent.submit(2)
    sent.engine.take(
        turn(admitted=[message.number], tokens=[(message.number, 7)], completed=[(its.number, COMPLETION)])
    )
    assert result(other) == COMPLETION
    assert isinstance(odd.future.exception(0), EngineFailed)


def test_a_request_that_cannot_be_queued_fails_alone(
    behind: Behind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread of the engine process that takes all requests goes on."""
    queue = behind.engine.submit

    def submit(asked: CaptionRequest) -> None:
        if asked.id == "2":
            raise ValueError("this request")
        queue(asked)

    monkeypatch.setattr(behind.engine, "submit", submit)
    sent = [request(image) for image in (1, 2, 3)]
    for each in sent:
        behind.remote.submit(each)
    assert [result(each).tokens[0] for each in (sent[0], sent[2])] == [100, 300]
    assert isinstance(sent[1].future.exception(PATIENCE), EngineFailed)
    assert "this request" in caplog.text
    assert behind.intake._futures == {}
