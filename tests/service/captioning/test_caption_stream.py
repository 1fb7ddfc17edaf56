"""A caption in pieces: each as its token comes, and an end, an error or a deadline in its place."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from snapcap.models.text import Region
from snapcap.service.api.app import Services
from snapcap.service.captioning.caption_text import CaptionText
from snapcap.service.captioning.captioner import Captioner, CaptionJob
from snapcap.service.captioning.model_defaults import Answer
from snapcap.service.captioning.options import CaptionOptions
from snapcap.service.captioning.stream import CaptionStream, LoopHandoff
from snapcap.service.captioning.times import CaptionTimes
from snapcap.service.engine.request import Completion
from snapcap.service.errors import DeadlineExceeded, EngineFailed
from snapcap.service.images.decode import DecodedImage, EncodedImage
from snapcap.service.limits import QueueFull

PATIENCE = 30.0


def completion(*tokens: int, reason: Any = "stop") -> Completion:
    return Completion(tokens, reason, "eager", 0.0, 0.0, 0.0)


def stream(*stop: str, end: str = "") -> CaptionStream:
    """Each token is the word of its number; `end` is what the detokeniser held back."""
    words: Any = SimpleNamespace(push=lambda token: f" {token}", end=lambda: end)
    handoff = LoopHandoff(asyncio.get_running_loop())
    deadline = time.monotonic() + PATIENCE
    return CaptionStream(words, CaptionText(stop), (7, 8, 9), deadline, handoff, CaptionTimes(), read_answer)


def read_answer(tokens: Sequence[int]) -> Answer:
    return Answer(" ".join(map(str, tokens)), [Region(str(token), (0, 0, token, token)) for token in tokens])


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, PATIENCE))


def test_a_piece_is_there_before_the_next_token_is() -> None:
    async def scenario() -> None:
        caption = stream()
        for token, piece in ((11, "11"), (12, " 12")):
            await asyncio.to_thread(caption.feed, token)
            assert await anext(caption, None) == piece
            assert not caption.future.done()
        waiting = asyncio.ensure_future(anext(caption, None))
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.to_thread(caption.future.set_result, completion(11, 12, reason="length"))
        assert await waiting is None
        assert (caption.finish_reason, len(caption.prompt_ids), len(caption.tokens)) == ("length", 3, 2)
        assert caption.answer == read_answer((11, 12))
        assert await anext(caption, None) is None

    run(scenario())


@pytest.mark.parametrize("fed", [0, 1, 3])
def test_tokens_that_were_not_handed_over_come_with_the_result(fed: int) -> None:
    async def scenario() -> None:
        caption = stream(end=" …")
        for token in (1, 2, 3)[:fed]:
            caption.feed(token)
        caption.future.set_result(completion(1, 2, 3))
        assert "".join([piece async for piece in caption]) == "1 2 3 …"
        assert len(caption.tokens) == 3

    run(scenario())


def test_a_stop_sequence_ends_the_generation() -> None:
    async def scenario() -> None:
        caption = stream("2 3")
        for token in (1, 2):
            caption.feed(token)
        assert await anext(caption, None) == "1"
        assert not caption.future.cancelled()
        caption.feed(3)
        caption.feed(4)
        assert "".join([piece async for piece in caption]) == ""
        assert caption.future.cancelled()
        assert (caption.finish_reason, len(caption.tokens)) == ("stop", 3)

    run(scenario())


def test_a_stop_sequence_in_a_result_cuts_it() -> None:
    async def scenario() -> None:
        caption = stream("2")
        caption.future.set_result(completion(1, 2, 3, reason="length"))
        assert "".join([piece async for piece in caption]) == "1"
        assert (caption.finish_reason, len(caption.tokens)) == ("stop", 2)

    run(scenario())


def test_a_stop_sequence_in_what_was_held_back_is_the_reason_of_the_end() -> None:
    async def scenario() -> None:
        caption = stream("3")
        caption.words = SimpleNamespace(push=lambda token: f" {token}" if token < 2 else "", end=lambda: " 2 3 4")
        caption.future.set_result(completion(1, 2, 3, 4, reason="length"))
        assert "".join([piece async for piece in caption]) == "1 2"
        assert caption.finish_reason == "stop"

    run(scenario())


def test_a_failure_comes_after_what_was_generated() -> None:
    async def scenario() -> None:
        caption = stream()
        caption.feed(1)
        caption.future.set_exception(EngineFailed())
        assert await anext(caption, None) == "1"
        with pytest.raises(EngineFailed):
            await anext(caption, None)

    run(scenario())


def test_a_device_that_hangs_does_not_hold_the_client() -> None:
    async def scenario() -> None:
        caption = stream()
        caption.feed(1)
        assert await anext(caption, None) == "1"
        caption.deadline = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await anext(caption, None)
        assert caption.future.cancelled()

    run(scenario())


def test_a_token_after_the_loop_has_ended_disturbs_nobody() -> None:
    kept: list[CaptionStream] = []

    async def scenario() -> None:
        kept.append(stream())

    run(scenario())
    kept[0].feed(1)
    kept[0].future.set_result(completion(1))


class Decoded:
    """A decoder that has the picture at once, in a slot."""

    def __init__(self) -> None:
        self.slots_free = 1

    async def decode(self, encoded: EncodedImage) -> DecodedImage:
        self.slots_free -= 1
        return DecodedImage(np.zeros((8, 8, 3), np.uint8), "png", 0.0, 0.0, (8, 8), self._free)

    def _free(self) -> None:
        self.slots_free += 1


def job(name: str, captioner: Captioner) -> CaptionJob:
    return CaptionJob(name, captioner.admit(), CaptionTimes())


def test_an_engine_that_refuses_a_stream_does_not_have_its_picture(services: Services, engine: Any) -> None:
    captioner, decoder = services.captioner, Decoded()
    model: Any = captioner._model
    captioner.attach(engine, "fake", decoder, model.defaults)
    engine.refuse = QueueFull()
    with pytest.raises(QueueFull):
        asyncio.run(captioner.stream(b"x", CaptionOptions(), job("1", captioner), live=True))
    assert decoder.slots_free == 1
    engine.refuse = None
    asyncio.run(captioner.stream(b"x", CaptionOptions(), job("2", captioner), live=True))
    assert decoder.slots_free == 0, "the engine has the picture"


def test_a_client_that_leaves_when_its_request_is_with_the_engine_withdraws_it(
    services: Services, engine: Any
) -> None:
    captioner, decoder = services.captioner, Decoded()
    model: Any = captioner._model
    captioner.attach(engine, "fake", decoder, model.defaults)
    engine.gate.clear()

    async def scenario() -> None:
        captioning = asyncio.create_task(captioner.caption(b"x", CaptionOptions(), job("1", captioner)))
        await asyncio.sleep(0)
        assert len(engine.requests) == 1
        captioning.cancel()
        with suppress(asyncio.CancelledError):
            await captioning

    run(scenario())
    (request,) = engine.requests
    assert request.future.cancelled()
