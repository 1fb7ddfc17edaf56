"""Decodes images in processes for the HTTP process, which only passes bytes on and hears what came of them.

    event loop ── bytes ──▶ an idle decode process ── pixels ──▶ a slot of the shared memory
         ▲                          │                                  │ whose number
         └───── format, seconds ────┘                                  ▼ goes to the engine process

A process that dies costs at most the image that it had, which is tried once more, elsewhere. One whose image is
late, or takes too long, is killed, and the image is not tried again.
"""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from snapcap.models.errors import UserError
from snapcap.service.errors import DeadlineExceeded, NotReady
from snapcap.service.images.decoder import (
    DecodedImage,
    Done,
    EncodedImage,
    ImageResult,
    UnreadableImage,
    too_large,
)
from snapcap.service.images.processes.channel import WorkerChannel
from snapcap.service.images.processes.family import ImageProcessFamily
from snapcap.service.images.processes.fork import ImageProcesses
from snapcap.service.images.processes.messages import (
    Answer,
    BadAnswer,
    Broken,
    Decoded,
    Needs,
    Refused,
    Setup,
)
from snapcap.service.images.processes.worker_handle import Job, Worker
from snapcap.service.images.room import ImageRoom
from snapcap.service.ipc.shared_pixels import FilledSlot, Slots
from snapcap.service.telemetry.metrics import Metrics
from snapcap.service.telemetry.reasons import TRIED_AGAIN, Why

if TYPE_CHECKING:
    from snapcap.models.processing.transform import ImageTransform

_LOOK_S = 0.25  # how often what is late is looked for, while there is anything
_ATTEMPTS = 2
_CRASHED = UnreadableImage(
    "crashed", "the image ended the process that decoded it, and then another; send it in another format"
)
_TOO_COMPLEX = UnreadableImage("too_complex", "the image takes too long to decode; save it anew, as baseline JPEG")


class ImageProcessError(RuntimeError):
    """A decode process met an error that no image should cause. The message has its trace."""


class ImageProcessesEndedError(UserError):
    """There are no decode processes, and there will be none."""


class ProcessImageDecoder:
    """An `ImageDecoder` that belongs to the event loop.

    `slots`: of the shared pixels. Each process that decodes has one, also when it has died and that is yet to be
    heard, while another has begun: two for each process must be there beside those of the queue. `most_s`: seconds
    of CPU time that an image may take. `failed`: no image can be decoded any more; called once."""

    def __init__(
        self,
        processes: ImageProcesses,
        slots: Slots,
        room: ImageRoom,
        most_s: float,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
        failed: Callable[[Exception], object],
    ) -> None:
        self._slots = slots
        self._room = room
        self._most_s = most_s
        self._loop = loop
        self._failed = failed
        self._waiting: deque[Job] = deque()
        self._large: deque[Job] = deque()  # those that wait for memory
        self._idle: list[Worker] = []
        self._answered_once = False
        self._looking = False
        self._family = ImageProcessFamily(processes, metrics, loop, self._began, self._gone)

    def begin(self, transform: "ImageTransform") -> bool:
        """Let the processes begin, and wait for the first; not on the event loop. False when there is none, and
        `failed` was called."""
        return self._family.begin(Setup(transform))

    @property
    def works(self) -> bool:
        """Whether a process has answered."""
        return self._answered_once

    def decode(self, encoded: EncodedImage, done: Done) -> None:
        if self._family.over:
            done(NotReady("failed"))
            return
        self._waiting.append(Job(encoded, done))
        self._feed()
        self._watch()

    def give_up(self, why: str) -> None:
        """End the processes and call `failed`; on the event loop."""
        self._family.give_up(why)

    def close(self) -> None:
        """End the processes, and wait until they have ended. The event loop is over by now."""
        self._family.close()

    def _gone(self, why: str) -> None:
        self._idle.clear()
        for jobs in (self._waiting, self._large):
            while jobs:
                jobs.popleft().end(NotReady("failed"))
        self._failed(ImageProcessesEndedError(f"images cannot be decoded any more: {why}"))

    def _feed(self) -> None:
        """Hand out what waits, as far as somebody is there for it."""
        while self._idle:
            jobs = self._large if self._large and self._room.fits(self._large[0].size) else self._waiting
            if not jobs:
                return
            job = jobs.popleft()
            reason = job.encoded.given_up(time.monotonic())
            if reason is not None:
                job.end(reason)
            elif not self._give(self._idle.pop(), job):
                jobs.appendleft(job)

    def _give(self, worker: Worker, job: Job) -> bool:
        slot = self._slots.take()
        worker.has(job, slot)
        if not worker.channel.send(slot, job.encoded.data, job.size or self._room.share):
            worker.job = None
            self._slots.give_back(slot)
            return False
        if job.size:
            self._room.take(job.size)
        return True

    def _taken_from(self, worker: Worker) -> Job | None:
        """What it had; the memory for it is free."""
        job, worker.job = worker.job, None
        if job is not None and job.size:
            self._room.give_back(job.size)
        return job

    def _answered(self, worker: Worker, slot: int, answer: Answer) -> None:
        if worker.killed is not None:  # it was faster than the signal
            return
        granted = self._room.share if worker.job is None else worker.job.size or self._room.share
        if worker.job is None or slot != worker.slot or (isinstance(answer, Needs) and answer.size <= granted):
            self._misbehaved(worker, BadAnswer(f"{type(answer).__name__} for slot {slot}"))
            return
        since, job = worker.since, self._taken_from(worker)
        if job is None:
            return
        self._answered_once = True
        outcome = (
            self._wait_for_room(job, answer.size) if isinstance(answer, Needs) else _outcome(answer, slot, since)
        )
        if outcome is None or not job.end(outcome):
            self._slots.give_back(slot)
        if not self._family.over:  # else it is about to be ended
            self._idle.append(worker)
        self._feed()

    def _wait_for_room(self, job: Job, size: int) -> ImageResult | None:
        """The outcome if it need not wait."""
        if size > self._room.most:
            return too_large(size, self._room.most)
        job.size = size
        error = self._room.refusal(len(self._large))
        if error is None:
            self._large.append(job)
        return error

    def _misbehaved(self, worker: Worker, error: BadAnswer) -> None:
        if worker.killed is None:
            self._family.kill(worker, "bad_answer", str(error))

    def _began(self, pid: int, end: socket.socket) -> Worker:
        worker = Worker(pid)
        worker.channel = WorkerChannel(
            end,
            self._loop,
            partial(self._answered, worker),
            partial(self._misbehaved, worker),
            partial(self._ended, worker),
        )
        self._idle.append(worker)
        self._feed()
        return worker

    def _ended(self, worker: Worker) -> None:
        """Its socket is closed, so it writes to its slot no more."""
        self._family.lost(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        self._watch()
        job = self._taken_from(worker)
        if job is None:
            return
        self._slots.give_back(worker.slot)
        if worker.killed is not None and worker.killed not in TRIED_AGAIN:
            return  # who waited has been told
        job.attempts += 1
        if self._family.over:
            job.end(NotReady("failed"))
        elif job.attempts < _ATTEMPTS:
            (self._large if job.size else self._waiting).appendleft(job)
            self._feed()
        else:
            job.end(_CRASHED)

    def _watch(self) -> None:
        if not self._looking and not self._family.over:
            self._looking = True
            self._loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """End what is late; also when nobody asks for more: a full queue refuses them before they come here."""
        self._looking = False
        now = time.monotonic()
        for worker in self._family.workers:
            why = worker.verdict(now, self._most_s)
            if why is not None:
                self._kill(worker, why)
        for jobs in (self._waiting, self._large):
            for job in list(jobs):
                reason = job.encoded.given_up(now)
                if reason is not None:
                    jobs.remove(job)
                    job.end(reason)
        self._family.look(_LOOK_S)
        busy = any(worker.job is not None for worker in self._family.workers)
        if busy or self._waiting or self._large or self._family.missing:
            self._watch()

    def _kill(self, worker: Worker, why: Why) -> None:
        self._family.kill(worker, why)
        if worker.job is not None and why not in TRIED_AGAIN:
            worker.job.end(_TOO_COMPLEX if why == "too_complex" else DeadlineExceeded())


def _outcome(answer: Answer, slot: int, since: float) -> ImageResult:
    """`since`: when it was handed out, before which nothing of it can have begun."""
    if isinstance(answer, Decoded):
        took = time.monotonic() - since
        began = min(max(answer.began, since), since + took)
        return DecodedImage(FilledSlot(slot), answer.format, began, min(answer.seconds, took))
    if isinstance(answer, Refused):
        return UnreadableImage(*answer)
    trace = answer.trace if isinstance(answer, Broken) else ""
    return ImageProcessError(f"in a decode process:\n{trace}")
