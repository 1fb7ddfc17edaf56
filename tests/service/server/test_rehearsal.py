"""The caption before READY: it takes the way of a request, and nobody counts it."""

import asyncio
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from support.fakes.list_engine import PATIENCE, Observer
from support.fakes.thread_decoder import ThreadImageDecoder

from snapcap.models.config import ModelConfig
from snapcap.models.processing.transform import ImageTransform
from snapcap.service.api.caption import CaptionRoutes
from snapcap.service.engine.device_thread import DeviceThread
from snapcap.service.engine.engine import Engine
from snapcap.service.engine.request import CaptionRequest
from snapcap.service.images.decode import EncodedImage
from snapcap.service.images.parent import picture
from snapcap.service.ipc.shared_pixels import Slots
from snapcap.service.server.rehearsal import AnswersAtOnce, DecodedBefore, rehearse
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.slot_request import SamplingParams
from snapcap.warmup.start.start import StartedModel


def rehearse_beside(engine: Engine, loaded: StartedModel) -> None:
    checkpoint = loaded.checkpoint
    with ThreadPoolExecutor(1) as pool:
        rehearse(engine, checkpoint, ThreadImageDecoder(pool, checkpoint.transform), asyncio.run)


class Start:
    """A start of the demo model with a rehearsal, until it is ready."""

    def __init__(self, folder: Path, rehearsal=rehearse_beside) -> None:
        options = StartOptions(ModelOptions(cache_dir=folder), ComputeOptions("cpu", backend="eager", threads=1))
        ready: Future[tuple[StartedModel, Engine]] = Future()
        self.timeline = Timeline.since_exec()
        self.observer = Observer()
        self.thread = DeviceThread(
            options,
            self.timeline,
            StartupStatus(),
            self.observer,
            on_ready=lambda loaded, engine: ready.set_result((loaded, engine)),
            on_failure=ready.set_exception,
            rehearse=rehearsal,
        )
        self.thread.start()
        self.loaded, self.engine = ready.result(PATIENCE)

    def stop(self) -> None:
        self.engine.stop()
        self.thread.join()


def test_a_request_is_answered_and_nobody_counts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = []
    endpoint = CaptionRoutes.caption

    async def kept(self, request):
        replies.append(await endpoint(self, request))
        return replies[-1]

    monkeypatch.setattr(CaptionRoutes, "caption", kept)
    start = Start(tmp_path)
    seen = (start.observer.encodes, start.observer.steps, start.observer.waited, start.observer.generated)
    try:
        (reply,) = replies
        assert reply.status_code == 200
        assert b'"tokens":2' in reply.body
        assert seen == ([], [], [], 0)
        assert start.timeline.marks() == {}
        phases = {phase.name: phase for phase in start.timeline.phases()}
        assert phases["rehearsal"].start >= phases["self_test"].end
        future: Future = Future()
        pixels = start.loaded.checkpoint.transform.decode(picture()).pixels
        start.engine.submit(CaptionRequest("1", pixels, (), SamplingParams(max_new_tokens=3), 1e12, future))
        assert len(future.result(PATIENCE).tokens) <= 3
        assert start.observer.waited
    finally:
        start.stop()


def test_a_rehearsal_that_fails_does_not_stop_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(engine: Engine, loaded: StartedModel) -> None:
        raise RuntimeError("no lines learnt")

    with caplog.at_level(logging.ERROR):
        start = Start(tmp_path, fails)
    start.stop()
    assert "no lines learnt" in caplog.text


@pytest.mark.parametrize(("longest", "rehearses"), [(0.0, False), (60.0, True)])
def test_a_start_says_if_captions_of_the_model_take_long(
    longest: float, rehearses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapcap.warmup.start.warmer.LONGEST_RUN_S", longest)
    start = Start(tmp_path)
    start.stop()
    assert start.loaded.rehearses == rehearses


def test_without_a_model_each_thread_decodes_and_serves_others_later(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, all_of_them = set(), threading.Barrier(3)
    decode = ImageTransform.decode

    def kept(self, data, room=None):
        all_of_them.wait(PATIENCE)  # none has time for two
        threads.add(threading.get_ident())
        return decode(self, data, room)

    monkeypatch.setattr(ImageTransform, "decode", kept)
    checkpoint = Checkpoint.of(StartOptions(), demo_folder, ModelConfig.from_folder(demo_folder))
    with ThreadPoolExecutor(3) as pool:
        rehearse(
            AnswersAtOnce(Slots(0)), checkpoint, ThreadImageDecoder(pool, checkpoint.transform), asyncio.run, 3
        )
        assert len(threads) == 3
        assert pool.submit(threading.get_ident).result(PATIENCE) in threads


def test_without_a_model_slots_of_the_shared_pixels_are_free_again() -> None:
    slots, future = Slots(1), Future()
    pixels = slots.take()
    AnswersAtOnce(slots).submit(CaptionRequest("1", pixels, (), SamplingParams(), 1e12, future))
    assert len(slots) == 1
    assert future.result().tokens


def test_the_pixels_that_a_rehearsal_left_are_given_to_the_next_one_and_back_where_nobody_takes_them() -> None:
    slots = Slots(2)
    left = slots.take()
    slots.give_back(left)
    decoder, encoded = DecodedBefore(slots), EncodedImage(b"", "1", 1e12)
    given = asyncio.run(decoder.decode(encoded))
    assert given.pixels == left
    assert len(slots) == 1
    given.discard()
    assert len(slots) == 2
