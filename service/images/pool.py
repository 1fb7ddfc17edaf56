"""Decodes images in processes for the HTTP process, which only passes bytes on and checks the answers.

    event loop ── bytes ──▶ an idle decode process ── pixels ──▶ the process's file of one image
         ▲                          │                                  │ copied by the event loop
         └───── format, seconds ────┘                                  ▼ into a slot, whose number the engine gets

An image may exploit a codec and control its decode process. Such a process reaches only its present image and its
own file, and each answer is checked. An image whose process dies is tried once more, in another process. A process
whose image is past its deadline, or takes too long, is killed, and the image is not tried again.

When several requests in a row have failed for want of a process that works, the server's own picture goes to a new
process, which no image can have taken over. If that fails too, the fault is not in the images, and the server ends.
Many refused images in a row have the same effect, at most once a minute.
"""

import asyncio
import logging
import math
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
from snapcap.service.images.sample import picture
from snapcap.service.ipc.shared_pixels import FilledSlot, SharedPixels, Slots
from snapcap.service.telemetry.metrics import Metrics
from snapcap.service.telemetry.reasons import TRIED_AGAIN, Why

if TYPE_CHECKING:
    from snapcap.models.processing.transform import ImageTransform

_LOOK_S = 0.25  # seconds between two checks for late images and processes, while there are any
_ATTEMPTS = 2
_SUSPICIOUS = 3  # number of failures in a row after which the server's own picture is decoded
_CHECK_S = 30.0
_REFUSALS = 32  # number of refused images in a row after which the server's own picture is decoded
_BETWEEN_CHECKS_S = 60.0  # at least so many seconds apart, as some clients send nothing but damaged images
_IDLE_LOOK_S = 5.0  # seconds between two checks of the processes without an image
_logger = logging.getLogger("snapcap.decode")
_CRASHED = UnreadableImage(
    "crashed", "the image ended the process that decoded it, and then another; send it in another format"
)
_TOO_COMPLEX = UnreadableImage("too_complex", "the image takes too long to decode; save it anew, as baseline JPEG")


class ImageProcessError(RuntimeError):
    """Reports an error in a decode process that no image should cause. The message has the traceback."""


class ImageProcessesEndedError(UserError):
    """Reports that all decode processes have ended and none can be started."""


class ProcessImageDecoder:
    """Decodes images in processes. An `ImageDecoder` whose methods run on the event loop.

    `pixels`: gets each decoded image, in a slot that `slots` gives. `room`: the memory for decoding. `most_s`: the
    most CPU seconds that one image may take. `failed`: called once, with the error, when no image can be decoded
    any more.
    """

    def __init__(
        self,
        processes: ImageProcesses,
        pixels: SharedPixels,
        slots: Slots,
        room: ImageRoom,
        most_s: float,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
        failed: Callable[[Exception], object],
    ) -> None:
        self._pixels = pixels
        self._slots = slots
        self._room = room
        self._most_s = most_s
        self._loop = loop
        self._failed = failed
        self._waiting: deque[Job] = deque()
        self._large: deque[Job] = deque()  # jobs that wait for a large part of the memory
        self._idle: list[Worker] = []
        self._answered_once = False
        self._looking = False
        self._failures = 0  # consecutive failed requests, counting only failures that no image should cause
        self._refusals = 0  # consecutive refused images
        self._check: Job | None = None  # the server's own picture, until its outcome is known
        self._checked_at = -math.inf  # when a process was last killed for a check after refusals
        self._idle_look: asyncio.TimerHandle | None = None
        self._family = ImageProcessFamily(processes, metrics, loop, self._began, self._gone)

    def begin(self, transform: "ImageTransform") -> bool:
        """Starts the decode processes and waits for the first one. Call this outside the event loop. Returns False
        if no process starts; `failed` is called then."""
        return self._family.begin(Setup(transform, self._room.most))

    @property
    def works(self) -> bool:
        """True once a decode process has answered."""
        return self._answered_once

    def decode(self, encoded: EncodedImage, done: Done) -> None:
        if self._family.over:
            done(NotReady("failed"))
            return
        self._waiting.append(Job(encoded, done))
        self._feed()
        self._watch()

    def give_up(self, why: str) -> None:
        """Ends the decode processes and calls `failed`, on the event loop. `why` is the reason, for the error."""
        self._family.give_up(why)

    def close(self) -> None:
        """Ends the decode processes and waits for their ends, after the event loop has stopped."""
        self._family.close()

    def _gone(self, why: str) -> None:
        self._idle.clear()
        for jobs in (self._waiting, self._large):
            while jobs:
                jobs.popleft().end(NotReady("failed"))
        self._failed(ImageProcessesEndedError(f"images cannot be decoded any more: {why}"))

    def _feed(self) -> None:
        """Hands waiting images to idle processes."""
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
        worker.has(job)
        if not worker.channel.send(job.encoded.data, job.size or self._room.share):
            worker.job = None
            return False
        if job.size:
            self._room.take(job.size)
        return True

    def _taken_from(self, worker: Worker) -> Job | None:
        """Removes and returns the image that a process has, and gives back its share of the memory."""
        job, worker.job = worker.job, None
        if job is not None and job.size:
            self._room.give_back(job.size)
        return job

    def _answered(self, worker: Worker, answer: Answer) -> None:
        if worker.killed is not None:  # the answer came before the SIGKILL took effect
            return
        job, since = worker.job, worker.since
        granted = self._room.share if job is None else job.size or self._room.share
        if job is None or (isinstance(answer, Needs) and (job.size or answer.size <= granted)):
            self._misbehaved(worker, BadAnswer(f"{type(answer).__name__} out of turn"))
            return
        slot = None
        if isinstance(answer, Decoded):
            slot = self._slots.take()
            try:
                self._pixels.copy(slot, worker.file)
            except (ValueError, OSError) as error:
                self._slots.give_back(slot)
                self._misbehaved(worker, BadAnswer(str(error)))
                return
        self._taken_from(worker)
        self._answered_once = True
        outcome = (
            self._wait_for_room(job, answer.size) if isinstance(answer, Needs) else _outcome(answer, slot, since)
        )
        taken_over = outcome is not None and self._end(job, outcome)
        if slot is not None and not taken_over:
            self._slots.give_back(slot)
        if self._family.over:  # the process is about to be ended
            return
        if isinstance(answer, Broken):  # its libraries may be in any state, and it may have been taken over
            self._family.kill(worker, "broken")
        elif self._refuses_all():
            self._checked_at, self._refusals = time.monotonic(), 0
            self._begin_check()
            self._family.kill(worker, "refusals")
        else:
            self._rest(worker)
        self._feed()

    def _rest(self, worker: Worker) -> None:
        worker.rests()
        self._idle.append(worker)

    def _refuses_all(self) -> bool:
        long_ago = time.monotonic() - self._checked_at > _BETWEEN_CHECKS_S
        return self._refusals >= _REFUSALS and self._check is None and long_ago

    def _begin_check(self) -> None:
        """Has the next new process decode the server's own picture."""
        check = EncodedImage(picture(), "self-check", time.monotonic() + _CHECK_S, lambda: False)
        self._check = Job(check, self._checked)

    def _end(self, job: Job, outcome: ImageResult) -> bool:
        """Ends a job with its outcome. After several failures that no image should cause, the next new process gets
        the server's own picture; each of these failures ended a process, so a new one will come.

        Returns whether the job's `done` took over the pixels.
        """
        if outcome is _CRASHED or isinstance(outcome, ImageProcessError):
            self._failures += 1
            if self._failures >= _SUSPICIOUS and self._check is None and not self._family.over:
                self._begin_check()
        elif isinstance(outcome, UnreadableImage):  # by any process, so that earlier failures still count
            self._refusals += 1
        elif isinstance(outcome, DecodedImage):
            self._failures = self._refusals = 0
        return job.end(outcome)

    def _checked(self, outcome: ImageResult) -> bool:
        """Ends the server if its own picture could not be decoded. Returns False, so that the slot of the pixels is
        reused."""
        self._check = None
        short_of_memory = isinstance(outcome, UnreadableImage) and outcome.reason == "too_large"
        if isinstance(outcome, UnreadableImage | ImageProcessError) and not short_of_memory:
            self._family.give_up("the server's own picture cannot be decoded either; the log has the cause")
        elif isinstance(outcome, DecodedImage):
            self._failures = 0
            _logger.warning("the server's own picture is decoded: images of several requests were at fault")
        return False

    def _wait_for_room(self, job: Job, size: int) -> ImageResult | None:
        """Queues an image that needs more than a share of the memory. Returns the outcome if the image is refused,
        else None."""
        if size > self._room.most:
            return too_large(size, self._room.most)
        job.size = size
        error = self._room.refusal(len(self._large))
        if error is None:
            self._large.append(job)
        return error

    def _misbehaved(self, worker: Worker, error: BadAnswer) -> None:
        if worker.killed is None:
            if worker in self._idle:
                self._idle.remove(worker)
            self._family.kill(worker, "bad_answer", str(error))

    def _began(self, pid: int, end: socket.socket, file: int) -> Worker:
        worker = Worker(pid, file)
        worker.channel = WorkerChannel(
            end,
            self._loop,
            partial(self._answered, worker),
            partial(self._misbehaved, worker),
            partial(self._ended, worker),
        )
        check = self._check
        if check is None or self._has_process(check) or not self._give(worker, check):
            self._rest(worker)
        self._feed()
        if self._idle_look is None:
            self._idle_look = self._loop.call_later(_IDLE_LOOK_S, self._look_at_idle)
        return worker

    def _has_process(self, job: Job) -> bool:
        return any(worker.job is job for worker in self._family.workers)

    def _ended(self, worker: Worker) -> None:
        """Handles a process that has ended or has closed its socket: its image is tried again, or refused."""
        self._family.lost(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        self._watch()
        job = self._taken_from(worker)
        if job is None:
            return
        if worker.killed is not None and worker.killed not in TRIED_AGAIN:
            return  # `_kill` has already ended the job
        job.attempts += 1
        if self._family.over:
            job.end(NotReady("failed"))
        elif job.attempts < _ATTEMPTS:
            if job is self._check:  # the next new process gets it
                return
            (self._large if job.size else self._waiting).appendleft(job)
            self._feed()
        else:
            self._end(job, _CRASHED)

    def _watch(self) -> None:
        if not self._looking and not self._family.over:
            self._looking = True
            self._loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Kills late processes and drops late images. A timer calls this, because a full queue keeps new requests
        from calling `decode`."""
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

    def _look_at_idle(self) -> None:
        """Kills processes without an image that use a CPU or keep memory: an image may have left code in them."""
        for worker in list(self._idle):
            why = worker.verdict_at_rest()
            if why is not None:
                self._idle.remove(worker)
                self._family.kill(worker, why)
        if not self._family.over:
            self._idle_look = self._loop.call_later(_IDLE_LOOK_S, self._look_at_idle)

    def _kill(self, worker: Worker, why: Why) -> None:
        self._family.kill(worker, why)
        if worker.job is not None and why not in TRIED_AGAIN:
            worker.job.end(_TOO_COMPLEX if why == "too_complex" else DeadlineExceeded())


def _outcome(answer: Decoded | Refused | Broken, slot: int | None, since: float) -> ImageResult:
    """Returns the outcome of a process's answer. `slot`: the slot of the pixels, if the answer is Decoded.
    `since`: the moment when the process got the image."""
    if isinstance(answer, Refused):
        return UnreadableImage(*answer)
    if isinstance(answer, Broken) or slot is None:
        return ImageProcessError(f"in a decode process:\n{answer.trace if isinstance(answer, Broken) else ''}")
    took = time.monotonic() - since
    # The process cannot be trusted: its decoding cannot have begun before it got the image.
    began = min(max(answer.began, since), since + took)
    return DecodedImage(FilledSlot(slot), answer.format, began, min(answer.seconds, took))
