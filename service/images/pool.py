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
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import UserError
from snapcap.service.errors import DeadlineExceeded, NotReady, UnprocessableImage
from snapcap.service.images.decode import DecodedImage, EncodedImage, unreadable
from snapcap.service.images.messages import Answer, BadAnswer, Broken, Decoded, Needs, Refused, Setup
from snapcap.service.images.parent import picture
from snapcap.service.images.processes import TRIED_AGAIN, ImageProcessFamily, Job, Worker
from snapcap.service.ipc.fork import ChildProcess
from snapcap.service.ipc.shared_pixels import SharedPixels, Slots
from snapcap.service.limits import ImageMemoryFull
from snapcap.service.telemetry.logs import visible
from snapcap.service.telemetry.metrics import Metrics, Why

if TYPE_CHECKING:
    from snapcap.models.processing.transform import ImageTransform

_LOOK_S = 0.25  # seconds between two checks for late images and processes, while there are any
_ATTEMPTS = 2
_SUSPICIOUS = 3  # number of failures in a row after which the server's own picture is decoded
_CHECK_S = 30.0
_REFUSALS = 32  # number of refused images in a row after which the server's own picture is decoded
_BETWEEN_CHECKS_S = 60.0  # at least so many seconds apart, as some clients send nothing but damaged images
_IDLE_LOOK_S = 1.0  # seconds between two checks of the processes without an image
# Most images that may wait for the second half of the memory. A longer queue would mean that most images come after
# their deadline.
_MOST_WAITING = 16
_CRASHED = "crashed"
_CRASHED_SENTENCE = "the image ended the process that decoded it, and then another; send it in another format"
_TOO_COMPLEX_SENTENCE = "the image takes too long to decode; save it anew, as baseline JPEG"
_logger = logging.getLogger("snapcap.decode")


class ImageProcessError(RuntimeError):
    """Reports an error in a decode process that no image should cause. The message has the traceback."""


class ImageRoom:
    """Divides the memory for pixels between images that are decoded at the same time.

    Half of the memory is divided equally among the decode processes. Most images take far less than such a share.
    An image that takes more waits for a part of the other half. `total`: bytes that all images together may take
    while they are decoded. `processes`: number of decode processes.
    """

    def __init__(self, total: int, processes: int) -> None:
        self.share = total // (2 * processes)
        self.most = max(total // 2, self.share)
        # With two processes or more, one takes no large image, so that small images do not wait for them.
        self._processes = max(processes - 1, 1)
        self._taken = 0
        self._takers = 0

    def fits(self, size: int) -> bool:
        """Returns whether a large image of `size` bytes may be decoded now."""
        return self._takers < self._processes and self._taken + size <= self.most

    def take(self, size: int) -> None:
        """Takes the memory of a large image, `size` bytes."""
        self._taken += size
        self._takers += 1

    def give_back(self, size: int) -> None:
        self._taken -= size
        self._takers -= 1


@dataclass(eq=False)
class ProcessImageDecoder:
    """Decodes images in processes. An `ImageDecoder`, which the family of the processes tells of each one. All
    methods run on the event loop.

    `parent`: of the `count` decode processes, of which `family` consists. `pixels`: gets each decoded image, in a
    slot that `slots` gives. `room`: the memory for decoding. `most_s`: the most CPU seconds that one image may
    take. `failed`: called once, with the error, when no image can be decoded any more.
    """

    parent: ChildProcess
    count: int
    pixels: SharedPixels
    slots: Slots
    room: ImageRoom
    most_s: float
    metrics: Metrics
    loop: asyncio.AbstractEventLoop
    failed: Callable[[Exception], object]

    def __post_init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._large: deque[Job] = deque()  # jobs that wait for a large part of the memory
        self._idle: list[Worker] = []
        self.works = False  # True once a decode process has answered
        self._looking = False
        self._failures = 0  # consecutive failed requests, counting only failures that no image should cause
        self._refusals = 0  # consecutive refused images
        self._check: Job | None = None  # the server's own picture, until its outcome is known
        self._checked_at = -math.inf  # when a process was last killed for a check after refusals
        self._idle_look: asyncio.TimerHandle | None = None
        self.family = ImageProcessFamily(self)

    def begin(self, transform: "ImageTransform", library: bytes | None = None) -> bool:
        """Starts the decode processes and waits for the first one. `library`: the image library's content, if the
        artifacts have it. Call this outside the event loop. Returns False if no process starts; `failed` is called
        then."""
        return self.family.begin(Setup(transform, self.room.most), library)

    async def decode(self, encoded: EncodedImage) -> DecodedImage:
        if self.family.over or self.family.left:
            raise NotReady("failed")
        job = self._job(encoded)
        self._waiting.append(job)
        self._feed()
        self._watch()
        try:
            outcome = await job.outcome
        except asyncio.CancelledError:
            # The outcome may have come just before the request was cancelled.
            if not job.outcome.cancelled() and isinstance(found := job.outcome.result(), DecodedImage):
                found.discard()
            raise
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def leave(self) -> None:
        """Stops to use the decode processes while the event loop goes on: refuses images that wait or are being
        decoded."""
        self.family.leave()
        if self._idle_look is not None:
            self._idle_look.cancel()
        self._idle.clear()
        held = [(worker, self._taken_from(worker)) for worker in self.family.workers]
        unended = [job for worker, job in held if job is not None and not self._has_ended_job(worker)]
        jobs = [*self._waiting, *self._large, *unended]
        self._waiting.clear()
        self._large.clear()
        for job in jobs:
            self._finish(job, NotReady("absent"))

    def began(self, worker: Worker) -> None:
        """Gives a new process the server's own picture, if that is to be tried, or else waiting images."""
        check = self._check
        under_way = [each.job for each in self.family.workers]
        if check is None or check in under_way or not self._give(worker, check):
            self._rest(worker)
        self._feed()
        if self._idle_look is None:
            self._idle_look = self.loop.call_later(_IDLE_LOOK_S, self._look_at_idle)

    def answered(self, worker: Worker, answer: Answer) -> None:
        """Ends the image of a process with its answer, and gives the process the next one."""
        if worker.killed is not None:  # the answer came before the SIGKILL took effect
            return
        job, since = worker.job, worker.since
        granted = self.room.share if job is None else job.size or self.room.share
        if job is None or (isinstance(answer, Needs) and (job.size or answer.size <= granted)):
            self.misbehaved(worker, BadAnswer(f"{type(answer).__name__} out of turn"))
            return
        pixels = None
        if isinstance(answer, Decoded):
            try:
                pixels = self._copy_pixels(worker)
            except (ValueError, OSError) as error:
                self.misbehaved(worker, BadAnswer(str(error)))
                return
        self._taken_from(worker)
        self.works = True
        if isinstance(answer, Needs):
            self._wait_for_room(job, answer.size)
        else:
            self._end(job, self._outcome(answer, pixels, since))
        if self.family.over:  # the process is about to be ended
            return
        if isinstance(answer, Broken):  # its libraries may be in any state, and it may have been taken over
            self.family.kill(worker, "broken")
        elif self._refuses_all():
            self._checked_at, self._refusals = time.monotonic(), 0
            self._begin_check()
            self.family.kill(worker, "refusals")
        else:
            self._rest(worker)
        self._feed()

    def misbehaved(self, worker: Worker, error: BadAnswer) -> None:
        """Kills a process whose answer was none that it may give, unless it is killed already."""
        if worker.killed is None:
            if worker in self._idle:
                self._idle.remove(worker)
            self.family.kill(worker, "bad_answer", str(error))

    def ended(self, worker: Worker) -> None:
        """Handles a process that has ended or has closed its socket: its image is tried again, or refused."""
        if worker in self._idle:
            self._idle.remove(worker)
        self._watch()
        job = self._taken_from(worker)
        if job is not None and not self._has_ended_job(worker):
            self._try_again(job)
        self._feed()  # a large image may wait for the memory of this one

    def _try_again(self, job: Job) -> None:
        """Queues an image whose process has ended for another one, or refuses it."""
        job.attempts += 1
        if self.family.over:
            self._finish(job, NotReady("failed"))
        elif job.attempts >= _ATTEMPTS:
            self._end(job, unreadable(_CRASHED, _CRASHED_SENTENCE))
        elif job is not self._check:  # the next new process gets the server's own picture
            (self._large if job.size else self._waiting).appendleft(job)

    def gone(self, why: str) -> None:
        """Ends all waiting images, and reports that no image can be decoded any more."""
        self._idle.clear()
        for jobs in (self._waiting, self._large):
            while jobs:
                self._finish(jobs.popleft(), NotReady("failed"))
        self.failed(UserError(f"images cannot be decoded any more: {why}"))

    def _job(self, encoded: EncodedImage) -> Job:
        if encoded.account is not None:
            encoded.account.hold()  # until the job ends, even if its request ends before
        return Job(encoded, self.loop.create_future())

    def _feed(self) -> None:
        """Hands waiting images to idle processes."""
        while self._idle:
            jobs = self._large if self._large and self.room.fits(self._large[0].size) else self._waiting
            if not jobs:
                return
            job = jobs.popleft()
            reason = job.given_up(time.monotonic())
            if reason is not None:
                self._finish(job, reason)
            elif not self._give(self._idle.pop(), job):
                jobs.appendleft(job)

    def _give(self, worker: Worker, job: Job) -> bool:
        if not worker.give(job, job.size or self.room.share):
            return False
        if job.size:
            self.room.take(job.size)
        return True

    def _taken_from(self, worker: Worker) -> Job | None:
        """Removes and returns the image that a process has, and gives back its share of the memory."""
        job, worker.job = worker.job, None
        if job is not None and job.size:
            self.room.give_back(job.size)
        return job

    def _copy_pixels(self, worker: Worker) -> int:
        """Copies the pixels of a process into a free slot, and returns its number. Raises ValueError or OSError if
        the process's file does not have them."""
        slot = self.slots.take()
        try:
            self.pixels.copy(slot, worker.file)
        except BaseException:
            self.slots.give_back(slot)
            raise
        return slot

    def _outcome(
        self, answer: Decoded | Refused | Broken, pixels: int | None, since: float
    ) -> DecodedImage | Exception:
        """Returns the outcome of a process's answer. `pixels`: the slot of the pixels, if the answer is Decoded.
        `since`: the moment when the process got the image."""
        if isinstance(answer, Refused):
            return unreadable(*answer)
        if isinstance(answer, Broken) or pixels is None:
            trace = answer.trace if isinstance(answer, Broken) else ""
            # Code of an image can choose the text: no line of it must look like one of the log.
            lines = "".join(f"\n  | {visible(line)}" for line in trace.splitlines())
            return ImageProcessError(f"in a decode process:{lines}")
        took = time.monotonic() - since
        # The process cannot be trusted: its decoding cannot have begun before it got the image.
        began, seconds = min(max(answer.began, since), since + took), min(answer.seconds, took)
        free = partial(self.slots.give_back, pixels)
        return DecodedImage(pixels, answer.format, began, seconds, answer.size, free)

    def _end(self, job: Job, outcome: DecodedImage | Exception) -> None:
        """Ends a job with its outcome. After several failures that no image should cause, the next new process gets
        the server's own picture; each of these failures ended a process, so a new one will come."""
        crashed = isinstance(outcome, UnprocessableImage) and outcome.reason == _CRASHED
        if isinstance(outcome, ImageProcessError) or crashed:
            self._failures += 1
            if self._failures >= _SUSPICIOUS and self._check is None and not self.family.over:
                self._begin_check()
        elif isinstance(outcome, UnprocessableImage):  # by any process, so that earlier failures still count
            self._refusals += 1
        elif isinstance(outcome, DecodedImage):
            self._failures = self._refusals = 0
        self._finish(job, outcome)

    def _finish(self, job: Job, outcome: DecodedImage | Exception) -> None:
        """Hands an outcome to the request, or to the check if the image is the server's own picture."""
        if job is self._check:
            self._checked(outcome)
        else:
            job.end(outcome)

    def _begin_check(self) -> None:
        """Has the next new process decode the server's own picture."""
        self._check = self._job(EncodedImage(picture(), "self-check", time.monotonic() + _CHECK_S))

    def _refuses_all(self) -> bool:
        long_ago = time.monotonic() - self._checked_at > _BETWEEN_CHECKS_S
        return self._refusals >= _REFUSALS and self._check is None and long_ago

    def _rest(self, worker: Worker) -> None:
        worker.rests()
        self._idle.append(worker)

    def _checked(self, outcome: DecodedImage | Exception) -> None:
        """Ends the server if its own picture could not be decoded."""
        self._check = None
        short_of_memory = isinstance(outcome, UnprocessableImage) and outcome.reason == "too_large"
        if isinstance(outcome, UnprocessableImage | ImageProcessError) and not short_of_memory:
            self.family.give_up("the server's own picture cannot be decoded either; the log has the cause")
        elif isinstance(outcome, DecodedImage):
            outcome.discard()
            self._failures = 0
            _logger.warning("the server's own picture is decoded: images of several requests were at fault")

    def _wait_for_room(self, job: Job, size: int) -> None:
        """Queues an image that needs more than a share of the memory, or refuses it."""
        if size > self.room.most:
            sentence = (
                f"the image takes about {_mebibytes(size)} MiB of memory to be decoded, over the limit of "
                f"{_mebibytes(self.room.most)} MiB; scale it down, or send it as baseline JPEG"
            )
            self._end(job, unreadable("too_large", sentence))
            return
        job.size = size
        if len(self._large) < _MOST_WAITING:
            self._large.append(job)
        else:
            self._end(job, ImageMemoryFull())

    def _watch(self) -> None:
        if not self._looking and not self.family.over and not self.family.left:
            self._looking = True
            self.loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Kills late processes and drops late images. A timer calls this, because a full queue keeps new requests
        from calling `decode`."""
        self._looking = False
        now = time.monotonic()
        for worker in self.family.workers:
            why = worker.verdict(now, self.most_s)
            if why is not None:
                self._kill(worker, why)
        for jobs in (self._waiting, self._large):
            for job in list(jobs):
                reason = job.given_up(now)
                if reason is not None:
                    jobs.remove(job)
                    self._finish(job, reason)
        self._feed()  # a large image may have waited behind one that is dropped
        self.family.look(_LOOK_S)
        busy = any(worker.job is not None for worker in self.family.workers)
        if busy or self._waiting or self._large or self.family.missing:
            self._watch()

    def _look_at_idle(self) -> None:
        """Kills processes without an image that use a CPU or keep memory: an image may have left code in them."""
        for worker in list(self._idle):
            why = worker.verdict_at_rest()
            if why is not None:
                self._idle.remove(worker)
                self.family.kill(worker, why)
        if not self.family.over:
            self._idle_look = self.loop.call_later(_IDLE_LOOK_S, self._look_at_idle)

    def _has_ended_job(self, worker: Worker) -> bool:
        """Returns whether `_kill` has ended the image of a process, which keeps the image until it has ended."""
        return worker.killed is not None and worker.killed not in TRIED_AGAIN

    def _kill(self, worker: Worker, why: Why) -> None:
        self.family.kill(worker, why)
        if worker.job is not None and why not in TRIED_AGAIN:
            too_complex = unreadable("too_complex", _TOO_COMPLEX_SENTENCE)
            self._finish(worker.job, too_complex if why in ("too_complex", "threads") else DeadlineExceeded())


def _mebibytes(size: int) -> int:
    return -(-size >> 20)
