"""Runs the demo model behind an engine, on a real device thread of this process."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.fakes.list_engine import hold

from snapcap.service.engine.device_thread import DeviceThread
from snapcap.service.engine.engine import Engine
from snapcap.service.engine.request import CaptionRequest, Completion
from snapcap.service.telemetry.work import Work
from snapcap.warmup.options import StartOptions
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.slot_request import SamplingParams
from snapcap.warmup.start.start import StartedModel

PATIENCE = 120.0


class Observer:
    """Rows of every encoder batch and decode step."""

    def __init__(self) -> None:
        self.encodes: list[tuple[int, int]] = []
        self.steps: list[tuple[int, int]] = []

    def __call__(self, work: Work) -> None:
        self.encodes += [batch[:2] for batch in work.encodes]
        self.steps.append(work.step[:2])


class Demo:
    """The demo model behind an engine."""

    def __init__(self, loaded: StartedModel, engine: Engine, observer: Observer, status: StartupStatus) -> None:
        self.loaded, self.engine, self.observer, self.status = loaded, engine, observer, status
        self.tokenizer, self.transform = loaded.checkpoint.tokenizer, loaded.checkpoint.transform

    def request(self, image: Path, prompt: str = "", **params: Any) -> CaptionRequest:
        pixels = self.transform.decode(image.read_bytes()).pixels
        ids = tuple(self.tokenizer.encode(prompt)) if prompt else ()
        deadline = time.monotonic() + PATIENCE
        return CaptionRequest(image.name, pixels, ids, SamplingParams(**params), deadline, Future())

    def run(self, request: CaptionRequest) -> Completion:
        self.engine.submit(request)
        return request.future.result(PATIENCE)

    def together(self, *requests: CaptionRequest) -> list[Completion]:
        """The results of requests that are all there before the next step."""
        release = self.hold()
        for request in requests:
            self.engine.submit(request)
        release.set()
        return [request.future.result(PATIENCE) for request in requests]

    def hold(self) -> threading.Event:
        return hold(self.engine, PATIENCE)


@contextmanager
def opened(options: StartOptions) -> Iterator[Demo]:
    started: Future[tuple[StartedModel, Engine]] = Future()
    observer, status = Observer(), StartupStatus()
    thread = DeviceThread(
        options,
        Timeline.since_exec(),
        status,
        observer,
        on_ready=lambda loaded, engine: started.set_result((loaded, engine)),
        on_failure=started.set_exception,
    )
    thread.start()
    loaded, engine = started.result(PATIENCE)
    try:
        yield Demo(loaded, engine, observer, status)
    finally:
        engine.stop()
        thread.join()
