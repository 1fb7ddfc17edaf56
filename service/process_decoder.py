"""Decoding in processes, as the HTTP process sees it: it only passes bytes on, and hears what came of them.

    event loop ── bytes ──▶ an idle decode process ── pixels ──▶ a slot of the shared memory
         ▲                          │                                  │ whose number
         └───── format, seconds ────┘                                  ▼ goes to the engine process

A process that dies costs at most the image that it had, which is tried once more, elsewhere. Where there are no
processes any more, threads of this one decode.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from service.child_process import how_it_ended
from service.decode_channel import DecodeChannel
from service.decode_fork import DecodeProcesses
from service.decode_messages import Answer, Began, Decoded, Ended, Refused, Setup
from service.decoder import Decoder, Done, NotWanted, Outcome, Picture, Unreadable
from service.metrics import Metrics
from service.notice_channel import NoticeChannel
from service.shared_pixels import FilledSlot, Slots

if TYPE_CHECKING:
    from models.preprocess import ImageTransform

# No image within the default limits takes a tenth of it: a process that does is stuck in a codec.
STUCK_S = 60.0
_LOOK_S = 1.0  # how often it is looked for, while images wait
_START_S = 30.0
_END_S = 5.0
_ATTEMPTS = 2
_CRASHED = Unreadable(
    "crashed", "the image ended the process that decoded it, and then another; send it in another format"
)
_logger = logging.getLogger("snapcap.decode")


class DecodeError(RuntimeError):
    """A decode process met an error that no image should cause. The message has its trace."""


@dataclass(eq=False)
class _Job:
    image: bytes
    left: Callable[[], bool]
    done: Done
    attempts: int = 0


class _Worker:
    """A decode process, and what it is doing since when."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.channel: DecodeChannel
        self.job: _Job | None = None
        self.slot = 0
        self.since = 0.0


class ProcessDecoder:
    """A `Decoder` that belongs to the event loop.

    `slots`: of the shared pixels. Each process that decodes has one, also when it has died and that is yet to be
    heard, while another has begun: two for each process must be there beside those of the queue."""

    def __init__(
        self, processes: DecodeProcesses, slots: Slots, metrics: Metrics, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._parent_pid = processes.parent.pid
        self._slots = slots
        self._metrics = metrics
        self._loop = loop
        self._threads: Decoder | None = None
        self._waiting: deque[_Job] = deque()
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._up: Future[bool] = Future()
        self._answered_once = False
        self._over = False  # no process will come any more
        self._looking = False  # for those that are stuck
        self._notices = NoticeChannel(processes.parent.end, loop, self._began, self._ended, self._parent_ended)

    def begin(self, transform: "ImageTransform", threads: Decoder) -> bool:
        """Let the processes begin, and wait for the first; not on the event loop. False when there is none.

        `threads`: who decodes where there are no processes."""
        self._threads = threads
        self._notices.send(Setup(transform))
        try:
            return self._up.result(_START_S)
        except TimeoutError:
            self._loop.call_soon_threadsafe(self.give_up, f"none was there after {_START_S:.0f} s")
            return False

    @property
    def works(self) -> bool:
        """Whether a process has answered, or threads decode."""
        return self._answered_once or self._over

    def decode(self, image: bytes, left: Callable[[], bool], done: Done) -> None:
        self._waiting.append(_Job(image, left, done))
        if self._over or self._idle:
            self._feed()
        elif not self._looking:
            self._end_stuck()

    def give_up(self, why: str) -> None:
        """Leave it to threads from now on, and say why; on the event loop."""
        if self._over:
            return
        self._over = True
        self._idle.clear()
        _logger.error("no decode processes: threads decode from now on", extra={"fields": {"why": why}})
        self._notices.close()
        self._end_parent(0)
        for worker in self._workers:  # where the kernel does not end them with their parent; their ends are heard
            _kill(worker.pid)
        if not self._up.done():
            self._up.set_result(False)
        self._feed()

    def close(self) -> None:
        """End the processes, and wait until they have ended. The event loop is over by now."""
        if self._over:
            return
        self._over = True
        self._notices.shut()  # first, so that their parent replaces none of them
        for worker in self._workers:
            worker.channel.shut()
        self._end_parent(_END_S)

    def _feed(self) -> None:
        """Hand out what waits, as far as somebody is there for it."""
        while self._waiting and (self._idle or self._over):
            job = self._waiting.popleft()
            if job.left():
                job.done(NotWanted())
            elif self._idle:
                self._give(self._idle.pop(), job)
            elif self._threads is not None:
                self._threads.decode(job.image, job.left, job.done)

    def _give(self, worker: _Worker, job: _Job) -> None:
        slot = self._slots.take()
        if worker.channel.send(slot, job.image):
            worker.job, worker.slot, worker.since = job, slot, time.monotonic()
        else:
            self._slots.give_back(slot)
            self._waiting.appendleft(job)

    def _answered(self, worker: _Worker, answer: Answer) -> None:
        job, worker.job = worker.job, None
        self._answered_once = True
        if job is not None and not job.done(_outcome(answer, worker.slot)):
            self._slots.give_back(worker.slot)
        if not self._over:  # else it is about to be ended
            self._idle.append(worker)
        self._feed()

    def _began(self, notice: Began, end: socket.socket) -> None:
        worker = _Worker(notice.pid)
        worker.channel = DecodeChannel(
            end, self._loop, partial(self._answered, worker), partial(self._worker_ended, worker)
        )
        self._workers.add(worker)
        self._idle.append(worker)
        self._metrics.decode_processes.set(len(self._workers))
        if not self._up.done():
            self._up.set_result(True)
        self._feed()

    def _worker_ended(self, worker: _Worker) -> None:
        """Its socket is closed, so it writes to its slot no more."""
        self._workers.remove(worker)
        self._metrics.decode_processes.set(len(self._workers))
        self._metrics.decode_process_deaths.inc()
        job = worker.job
        if job is None:
            if worker in self._idle:
                self._idle.remove(worker)
            return
        self._slots.give_back(worker.slot)
        job.attempts += 1
        if job.attempts < _ATTEMPTS:
            self._waiting.appendleft(job)
            self._feed()
        else:
            job.done(_CRASHED)

    def _ended(self, notice: Ended) -> None:
        fields = {"pid": notice.pid, "how": how_it_ended(notice.code)}
        _logger.warning("decode process ended", extra={"fields": fields})

    def _parent_ended(self) -> None:
        self.give_up("their parent has ended")

    def _end_parent(self, patience: float) -> None:
        """Wait for its end, and kill it when that does not come in so many seconds."""
        until = time.monotonic() + patience
        while os.waitpid(self._parent_pid, os.WNOHANG) == (0, 0):
            if time.monotonic() >= until:
                _kill(self._parent_pid)
                os.waitpid(self._parent_pid, 0)
                return
            time.sleep(0.005)

    def _end_stuck(self) -> None:
        """While images wait, which is while all are busy; also when nobody asks for more: a full queue refuses them
        before they come here."""
        self._looking = bool(self._waiting)
        if not self._looking:
            return
        earliest = time.monotonic() - STUCK_S
        for worker in self._workers:
            if worker.job is not None and worker.since < earliest:
                _kill(worker.pid)
        self._loop.call_later(_LOOK_S, self._end_stuck)


def _outcome(answer: Answer, slot: int) -> Outcome:
    if isinstance(answer, Decoded):
        return Picture(FilledSlot(slot), *answer)
    if isinstance(answer, Refused):
        return Unreadable(*answer)
    return DecodeError(f"in a decode process:\n{answer.trace}")


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
