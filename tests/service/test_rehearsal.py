"""The caption before READY: it takes the way of a request, and nobody counts it."""

import logging
from concurrent.futures import Future
from pathlib import Path

import pytest
from support.list_engine import PATIENCE, Observer

from service.device_thread import DeviceThread
from service.engine import Engine
from service.rehearsal import rehearse
from service.rehearsal_picture import picture
from service.request import CaptionRequest, SamplingParams
from service.routes.caption import CaptionRoutes
from warmup.options import StartOptions, StoreOptions
from warmup.prepared import Checkpoint
from warmup.startup import Loaded
from warmup.status import StartupStatus
from warmup.timeline import Timeline


class Start:
    """A start of the demo model with a rehearsal, until it is ready."""

    def __init__(self, folder: Path, rehearsal=rehearse) -> None:
        options = StartOptions("demo", folder, StoreOptions(folder), device="cpu", backend="eager", threads=1)
        ready: Future[tuple[Loaded, Engine]] = Future()
        self.timeline = Timeline.since_exec()
        self.observer = Observer()
        self.thread = DeviceThread(
            options,
            self.timeline,
            StartupStatus(),
            self.observer,
            queue_size=4,
            on_ready=lambda loaded, engine, _: ready.set_result((loaded, engine)),
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
    def fails(engine: Engine, checkpoint: Checkpoint) -> None:
        raise RuntimeError("no lines learnt")

    with caplog.at_level(logging.ERROR):
        start = Start(tmp_path, fails)
    start.stop()
    assert "no lines learnt" in caplog.text
