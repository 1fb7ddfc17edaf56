"""Tracks one decode process for the HTTP process: its image, since when, and why it is to be killed."""

import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import field

from snapcap.models.dataclass import dataclass
from snapcap.service.images.decoder import Done, EncodedImage, ImageResult
from snapcap.service.images.processes.channel import WorkerChannel
from snapcap.service.telemetry.reasons import Why

_logger = logging.getLogger("snapcap.decode")
# A client that has left is no reason to end a process for a picture that is about to be ready.
LEFT_S = 1.0
# Without CPU time all along, while it has an image: it is stopped, or waits for what never comes.
HUNG_S = 5.0


@dataclass(eq=False)
class Job:
    """An image on its way. `size`: bytes of memory that it takes where that is more than a share, else 0."""

    encoded: EncodedImage
    done: Done
    attempts: int = 0
    size: int = 0

    def end(self, outcome: ImageResult) -> bool:
        """Hand on what came of the image. Whether its pixels were taken over: not where that raised anything. The
        slot and the process are for the next image in any case."""
        try:
            return self.done(outcome)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            fields = {"request_id": self.encoded.request_id}
            _logger.exception("what came of an image could not be handed on", extra={"fields": fields})
            return False


@dataclass(eq=False)
class Worker:
    pid: int
    file: int  # of `image_file`: the process writes its pixels there
    channel: WorkerChannel = field(init=False)
    job: Job | None = None
    since: float = 0.0
    killed: Why | None = None  # and its end is yet to be heard
    ended: bool = False  # as its parent says
    _cpu_at_first: float | None = None
    _cpu: float | None = None
    _busy: float = 0.0  # when its CPU time was last seen to grow

    def has(self, job: Job) -> None:
        """Give it the image, from now on."""
        self.job, self.since = job, time.monotonic()
        self._cpu_at_first = self._cpu = cpu_seconds(self.pid)
        self._busy = self.since

    def verdict(self, now: float, most_s: float) -> Why | None:
        """Why it should be ended now, if it should. `most_s`: CPU seconds that an image may take."""
        job = self.job
        if job is None or self.killed is not None:
            return None
        if now >= job.encoded.deadline:
            return "deadline"
        if job.encoded.left() and now - self.since > LEFT_S:
            return "client_left"
        return self._verdict_of_cpu(now, most_s)

    def _verdict_of_cpu(self, now: float, most_s: float) -> Why | None:
        cpu = cpu_seconds(self.pid)
        if cpu is None or self._cpu_at_first is None or self._cpu is None:  # not told here: a second is a second
            return "too_complex" if now - self.since > most_s else None
        if cpu > self._cpu:
            self._cpu, self._busy = cpu, now
        if cpu - self._cpu_at_first > most_s:
            return "too_complex"
        return "hung" if now - self._busy > HUNG_S else None


def cpu_seconds(pid: int) -> float | None:
    """CPU time of another process, as `clock_getcpuclockid(3)` has it; None where there is none."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except (OSError, OverflowError):
        return None


def kill(pid: int) -> None:
    """Also one that is stopped."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
