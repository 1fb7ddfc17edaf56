"""The device thread: it owns the runner, and between two decode steps it admits waiting requests."""

import logging
import queue
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, TypeVar

from service.errors import EngineFailed
from service.request import CaptionRequest
from service.scheduler import Limits, Running, Scheduler
from warmup.row import Row

if TYPE_CHECKING:
    from warmup.runner import Runner

log = logging.getLogger("snapcap.engine")
T = TypeVar("T")

# A device that fails this often in a row does not come back (a CUDA error is sticky): the process must go.
MAX_CONSECUTIVE_FAILURES = 3


class EngineObserver(Protocol):
    """What the engine reports as it runs; seconds and rows."""

    def queue_waited(self, seconds: float) -> None: ...

    def encoded(self, bucket: int, rows: int, seconds: float) -> None: ...

    def decode_stepped(self, bucket: int, rows: int, seconds: float) -> None: ...

    def tokens_generated(self, count: int) -> None: ...


class Engine:
    """Continuous batching over a runner's slots. ``run`` is the device thread; ``submit`` is for everyone else."""

    def __init__(self, scheduler: Scheduler, observer: EngineObserver) -> None:
        self._scheduler = scheduler
        self._observer = observer
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._failures = 0

    @property
    def limits(self) -> Limits:
        return self._scheduler.limits

    def submit(self, request: CaptionRequest) -> None:
        """Queue a request; its result or exception arrives in ``request.future``.

        Raises:
            Overloaded: the queue is full.
            NotReady: the engine has stopped.
        """
        self._scheduler.submit(request)

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run ``function`` on the device thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        self._scheduler.wake()
        return future

    def stop(self) -> None:
        """Take nothing in any more and let ``run`` return once no request is left."""
        self._stopping = True
        self._scheduler.close()

    def run(self, runner: "Runner", backend_of: Callable[[int], str]) -> None:
        """Serve until ``stop``; the calling thread becomes the device thread.

        ``backend_of`` names the backend that decodes a bucket of so many rows, for the reply.

        Raises:
            EngineFailed: the device failed several times in a row; everything that waited has failed.
        """
        scheduler = self._scheduler
        while not (self._stopping and not scheduler.running and not scheduler.depth):
            scheduler.wait()
            while not self._calls.empty():
                self._calls.get()()
            try:
                self._serve_once(runner, backend_of)
                self._failures = 0
            except Exception as error:
                self._failures += 1
                log.exception("device step failed (%d in a row)", self._failures)
                scheduler.fail_running(EngineFailed())
                if self._failures >= MAX_CONSECUTIVE_FAILURES:
                    scheduler.fail_all()
                    raise EngineFailed() from error

    def _serve_once(self, runner: "Runner", backend_of: Callable[[int], str]) -> None:
        scheduler = self._scheduler
        self._apply(runner, scheduler.drop_lost())
        admitted = scheduler.admit()
        if admitted:
            self._encode(runner, admitted)
        if not scheduler.running:
            return
        rows = len(scheduler.running)
        bucket = scheduler.table.fit(rows)
        started = time.perf_counter()
        runner.decode_step(bucket, sampling=any(row.samples for row in scheduler.running))
        tokens = runner.tokens(rows)
        self._observer.decode_stepped(bucket.size, rows, time.perf_counter() - started)
        generating = sum(not row.prompt_left for row in scheduler.running)
        self._observer.tokens_generated(generating)
        self._apply(runner, scheduler.advance(tokens, backend_of(bucket.size)))

    def _encode(self, runner: "Runner", admitted: list[Running]) -> None:
        bucket = self._scheduler.table.fit(len(admitted))
        first = len(self._scheduler.running) - len(admitted)
        started = time.perf_counter()
        runner.encode(bucket, [row.request.pixels for row in admitted], first)
        for slot, row in enumerate(admitted, start=first):
            runner.admit(slot, self._row(row.request))
            self._observer.queue_waited(row.admitted - row.submitted)
        seconds = time.perf_counter() - started
        self._observer.encoded(bucket.size, len(admitted), seconds)
        for row in admitted:
            row.encode_s = seconds

    def _row(self, request: CaptionRequest) -> Row:
        params = request.params
        if not params.temperature:
            return Row(prompt=request.prompt_ids)
        generator = random.Random(params.seed)  # noqa: S311  sampling, not secrets
        uniforms = [generator.random() for _ in range(self.limits.cache_length)]
        return Row(request.prompt_ids, params.temperature, params.top_k, params.top_p, uniforms)

    @staticmethod
    def _apply(runner: "Runner", moves: list[tuple[int, int]]) -> None:
        for source, target in moves:
            runner.move(source, target)
