"""Tracks one decode process for the HTTP process: its image, since when, and why it should be killed."""

import logging
import os
import resource
import signal
import time
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from snapcap.models.dataclass import dataclass
from snapcap.service.images.decoder import Done, EncodedImage, ImageResult
from snapcap.service.images.processes.channel import WorkerChannel
from snapcap.service.telemetry.reasons import Why

_logger = logging.getLogger("snapcap.decode")
# Seconds of decoding after which a process is killed if its client has left. An image that takes less is nearly
# done.
LEFT_S = 1.0
# Seconds without CPU time after which a process with an image counts as hung: it is stopped or blocked for ever.
HUNG_S = 5.0
# Bounds of a process without an image: CPU seconds until its next image, and bytes of memory beyond those that it
# had when it was new. Codecs keep some memory; the allocator gives most of it back.
_IDLE_CPU_S = 1.0
_IDLE_BYTES = 128 << 20


@dataclass(eq=False)
class Job:
    """Holds an image on its way through decoding. `size`: bytes of memory that it takes if that is more than a
    share, else 0."""

    encoded: EncodedImage
    done: Done
    attempts: int = 0
    size: int = 0

    def end(self, outcome: ImageResult) -> bool:
        """Calls `done` with the outcome, and logs an error of `done`.

        Returns whether the pixels were taken over; False if `done` raised an error, so that the slot and the
        process are free for the next image.
        """
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
    file: int  # descriptor of an `image_file`, into which the process writes pixels
    channel: WorkerChannel = field(init=False)
    job: Job | None = None
    since: float = 0.0
    killed: Why | None = None  # why it was killed, until its end is handled
    ended: bool = False  # the parent has reported its end
    _cpu_at_first: float | None = None
    _cpu: float | None = None
    _busy: float = 0.0  # moment when its CPU time was last seen to grow
    _cpu_at_rest: float | None = None
    _new_bytes: int | None = None

    def rests(self) -> None:
        """Notes that the process has no image from now on."""
        self._cpu_at_rest = cpu_seconds(self.pid)
        if self._new_bytes is None:
            self._new_bytes = own_bytes(self.pid)

    def verdict_at_rest(self) -> Why | None:
        """Returns why a process without an image should be killed, or None. An image may have left code in it."""
        cpu, held = cpu_seconds(self.pid), own_bytes(self.pid)
        busy = cpu is not None and self._cpu_at_rest is not None and cpu - self._cpu_at_rest > _IDLE_CPU_S
        large = held is not None and self._new_bytes is not None and held - self._new_bytes > _IDLE_BYTES
        return "idle" if busy or large else None

    def has(self, job: Job) -> None:
        """Notes that the process has the image from now on."""
        self.job, self.since = job, time.monotonic()
        self._cpu_at_first = self._cpu = cpu_seconds(self.pid)
        self._busy = self.since

    def verdict(self, now: float, most_s: float) -> Why | None:
        """Returns why the process should be killed now, or None. `most_s`: the most CPU seconds that an image may
        take."""
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
        # No CPU time is reported: elapsed seconds count.
        if cpu is None or self._cpu_at_first is None or self._cpu is None:
            return "too_complex" if now - self.since > most_s else None
        if cpu > self._cpu:
            self._cpu, self._busy = cpu, now
        if cpu - self._cpu_at_first > most_s:
            return "too_complex"
        return "hung" if now - self._busy > HUNG_S else None


def cpu_seconds(pid: int) -> float | None:
    """Returns the CPU seconds of another process, from the clock of `clock_getcpuclockid(3)`; None if the process
    has none."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except (OSError, OverflowError):
        return None


def own_bytes(pid: int) -> int | None:
    """Returns the bytes of memory of another process that no file has; None if the system does not report them."""
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except (OSError, ValueError):
        return None
    return (int(resident) - int(shared)) * resource.getpagesize()


def kill(pid: int) -> None:
    """Sends SIGKILL to a process, which works for a stopped process too. Ignores a process that has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
