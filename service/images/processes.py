"""Follows the decode processes and their parent in the HTTP process, on its event loop.

The parent (`parent.py`) forks the decode processes, and replaces and reaps those that end. The parent hands the
HTTP process the socket and the file of each new process. The HTTP process sends images, receives answers, and kills
a process that takes too long or misbehaves.

When the parent ends, the decode processes end too. When the parent hangs, dead processes are not replaced. The
HTTP process has threads, so it cannot fork a new parent: it reports the failure, and the server ends.
"""

import asyncio
import logging
import os
import re
import resource
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.models.dataclass import dataclass
from snapcap.models.processing.image_formats import sniff
from snapcap.service.errors import DeadlineExceeded
from snapcap.service.images.decode import DecodedImage, EncodedImage
from snapcap.service.images.messages import HEAD, AnswerReader, BadAnswer, Began, Ended, Notice, Setup
from snapcap.service.ipc.channel import LoopChannel
from snapcap.service.ipc.fork import how_it_ended
from snapcap.service.ipc.framing import RECEIVE_BYTES, receive
from snapcap.service.telemetry.metrics import Why

if TYPE_CHECKING:
    from snapcap.service.images.pool import ProcessImageDecoder

START_S = 30.0
# Seconds without a notice after which the parent counts as hung, if a process is missing. The parent reports the
# end of a process within milliseconds, and once a second that it cannot start another.
SILENT_S = 10.0
# Seconds of decoding after which a process is killed if its client has left. An image that takes less is nearly
# done.
LEFT_S = 1.0
# Seconds without CPU time after which a process with an image counts as hung: it is stopped or blocked for ever.
HUNG_S = 5.0
# Bounds of a process without an image: CPU seconds until its next image, and bytes of memory beyond those that it
# had when it was new. Codecs keep some memory; the allocator gives most of it back.
_IDLE_CPU_S = 1.0
_IDLE_BYTES = 128 << 20
# Number of threads of a process. A thread takes memory of the kernel, which no limit of the process counts.
_MOST_THREADS = 16
_END_S = 5.0
# Seconds after which a process that closed its socket is killed. The parent reports the end of a process within
# milliseconds, so this process is still running.
_GOES_ON_S = 1.0
# For these reasons the image is decoded again, because the process was at fault and not the image.
TRIED_AGAIN: tuple[Why, ...] = ("hung", "bad_answer")
# The reasons as sentences of the log.
_SENTENCES: dict[Why, str] = {
    "deadline": "killed at the deadline of its request",
    "too_complex": "killed: its image took more CPU time than --decode-timeout allows",
    "client_left": "killed: its client has left",
    "hung": "killed: it had an image to decode and made no progress",
    "broken": "killed: decoding failed in a way that no image should cause",
    "idle": "killed: it used CPU time or kept memory without an image",
    "threads": "killed: it started more threads than a codec needs",
    "refusals": "killed: after many refused images, a new process is to decode the server's own picture",
    "bad_answer": "killed: its answer was not one that a decode process may give",
}
_KEPT = re.compile(r"^Rss(?:Anon|Shmem):\s*(\d+) kB$", re.MULTILINE)  # lines of proc(5)'s status
_FILES = 2  # `Began` carries two: the socket to the process, and the file of its pixels
_logger = logging.getLogger("snapcap.decode")


@dataclass(eq=False)
class Job:
    """Holds an image on its way through decoding. `outcome` gets the decoded image, or the error as a value; its
    request cancels it. `size`: bytes of memory that the image takes if that is more than a share, else 0."""

    encoded: EncodedImage
    outcome: "asyncio.Future[DecodedImage | Exception]"
    attempts: int = 0
    size: int = 0

    def given_up(self, now: float) -> Exception | None:
        """Returns the outcome if the image need not be decoded, because its client has left or its deadline has
        passed; else None."""
        return DeadlineExceeded() if self.outcome.cancelled() or now >= self.encoded.deadline else None

    def end(self, outcome: DecodedImage | Exception) -> None:
        """Hands the outcome to the request, or discards it if the request was cancelled. Call this once."""
        if self.encoded.account is not None:
            self.encoded.account.release()
        if not self.outcome.cancelled():
            self.outcome.set_result(outcome)
        elif isinstance(outcome, DecodedImage):
            outcome.discard()


class Worker:
    """Holds one decode process: its image, and the socket to it. No call blocks: bytes that do not fit the socket's
    buffer are sent later.

    `file`: the descriptor of an `image_file`, into which the process writes pixels. `job`: the image that it has,
    `since` when. `killed`: why it was killed, until its end is handled. `ended`: whether the parent has reported
    its end.
    """

    def __init__(self, pid: int, end: socket.socket, file: int, family: "ImageProcessFamily") -> None:
        """Starts to receive on the socket `end`."""
        end.setblocking(False)
        self.pid = pid
        self.file = file
        self.job: Job | None = None
        self.since = 0.0
        self.killed: Why | None = None
        self.ended = False
        self._end = end
        self._family = family
        self._reader = AnswerReader()
        self._rest = memoryview(b"")  # the part of the image that is not sent yet
        self._cpu_at_first: float | None = None
        self._cpu: float | None = None
        self._busy = 0.0  # moment when its CPU time was last seen to grow
        self._cpu_at_rest: float | None = None
        self._new_bytes: int | None = None
        family.loop.add_reader(end, self._receive)

    def give(self, job: Job, room: int) -> bool:
        """Sends an image to the process, with `room`, the bytes of memory that it may take. The last image must
        have been answered. Returns False if the process has ended, and then has not taken the image."""
        since, cpu, image = time.monotonic(), cpu_seconds(self.pid), job.encoded.data
        head = HEAD.pack(len(image), room)
        try:
            sent = self._end.sendmsg((head, image))
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:  # the process has ended; the end of file follows
            return False
        if sent < len(head) + len(image):
            whole, begun = (image, sent - len(head)) if sent >= len(head) else (head + image, sent)
            self._rest = memoryview(whole)[begun:]
            self._family.loop.add_writer(self._end, self._send_rest)
        self.job, self.since = job, since
        self._cpu_at_first, self._cpu, self._busy = cpu, cpu, since
        return True

    def rests(self) -> None:
        """Notes that the process has no image from now on."""
        self._cpu_at_rest = cpu_seconds(self.pid)
        if self._new_bytes is None:
            self._new_bytes = kept_bytes(self.pid)

    def verdict_at_rest(self) -> Why | None:
        """Returns why a process without an image should be killed, or None. An image may have left code in it."""
        cpu, held = cpu_seconds(self.pid), kept_bytes(self.pid)
        busy = cpu is not None and self._cpu_at_rest is not None and cpu - self._cpu_at_rest > _IDLE_CPU_S
        large = held is not None and self._new_bytes is not None and held - self._new_bytes > _IDLE_BYTES
        if threads(self.pid) > _MOST_THREADS:
            return "threads"
        return "idle" if busy or large else None

    def verdict(self, now: float, most_s: float) -> Why | None:
        """Returns why the process should be killed now, or None. `most_s`: the most CPU seconds that an image may
        take."""
        job = self.job
        if job is None or self.killed is not None:
            return None
        if now >= job.encoded.deadline:
            return "deadline"
        if job.outcome.cancelled() and now - self.since > LEFT_S:
            return "client_left"
        return "threads" if threads(self.pid) > _MOST_THREADS else self._slow(now, most_s)

    def _slow(self, now: float, most_s: float) -> Why | None:
        cpu = cpu_seconds(self.pid)
        # No CPU time is reported: elapsed seconds count.
        if cpu is None or self._cpu_at_first is None or self._cpu is None:
            return "too_complex" if now - self.since > most_s else None
        if cpu > self._cpu:
            self._cpu, self._busy = cpu, now
        if cpu - self._cpu_at_first > most_s:
            return "too_complex"
        return "hung" if now - self._busy > HUNG_S else None

    def reported_ended(self) -> None:
        """Takes the last answer and closes the socket of a process that has ended. A child that the process forked
        may keep the socket open, so the end of file might never come."""
        self.ended = True
        if self._receive():
            self._lost()

    def leave(self) -> None:
        """Stops to send and to receive, on the event loop."""
        self._family.loop.remove_reader(self._end)
        self._family.loop.remove_writer(self._end)

    def close(self) -> None:
        """Closes the socket and the file after the event loop has stopped, or after `leave`. The process ends when
        its present image is done."""
        self._end.close()
        os.close(self.file)

    def _receive(self) -> bool:
        """Receives and handles answers. Returns whether the process still has its socket open."""
        data = receive(self._end)
        if data is None:
            return True
        if not data:
            self._lost()
            return False
        try:
            for answer in self._reader.feed(data):
                self._family.user.answered(self, answer)
        except BadAnswer as error:
            self._reader = AnswerReader()
            self._family.user.misbehaved(self, error)
        return True

    def _lost(self) -> None:
        self.leave()
        self.close()
        self._family.lost(self)

    def _send_rest(self) -> None:
        try:
            sent = self._end.send(self._rest)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            sent = len(self._rest)
        self._rest = self._rest[sent:]
        if not self._rest:
            self._rest = memoryview(b"")  # an empty memoryview of the image would keep the whole image in memory
            self._family.loop.remove_writer(self._end)


class NoticeChannel(LoopChannel[Notice]):
    """Receives notices on the event loop. Calls `began` for a new decode process, with its socket and the file of
    its pixels; `said` for every other notice; `gone` when the parent has ended."""

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        began: Callable[[Began, socket.socket, int], object],
        said: Callable[[Notice], object],
        gone: Callable[[], object],
    ) -> None:
        super().__init__(end, loop, self._hear, gone)
        self._began = began
        self._said = said
        self._files: deque[int] = deque()

    def close(self) -> None:
        """Closes the socket and the received files, after the event loop has stopped or after `leave`."""
        self._end.close()
        while self._files:
            os.close(self._files.popleft())

    def _arrived(self) -> bytes | None:
        try:
            data, files, _, _ = socket.recv_fds(self._end, RECEIVE_BYTES, _FILES)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""
        if len(files) == _FILES:
            self._files += files
        else:  # the files are incomplete, because this process has too many open files
            for each in files:
                os.close(each)
        return data

    def _hear(self, notice: Notice) -> None:
        if not isinstance(notice, Began):
            self._said(notice)
        elif self._files:
            for each in self._files:
                os.set_inheritable(each, False)  # received files are inheritable unless this is set
            end = socket.socket(fileno=self._files.popleft())
            self._began(notice, end, self._files.popleft())
        else:  # this process closed the socket of the decode process, which therefore ends and is replaced
            _logger.warning("no socket to a decode process", extra={"fields": {"pid": notice.pid}})
            self.send(None)  # asks the parent to wait before it starts the next one
            self._said(notice)


class ImageProcessFamily:
    """Tracks the decode processes for `user`: which there are, which were killed and why, and whether the parent
    still replaces those that end."""

    def __init__(self, user: "ProcessImageDecoder") -> None:
        """`user` has the parent and the number of the processes. The family tells `user` of each process, on the
        event loop."""
        parent = user.parent
        self.workers: set[Worker] = set()
        self.over = False  # no process will be started any more
        self.left = False  # no process is used any more
        self._parent_pid = parent.pid
        self._count = user.count
        self._metrics = user.metrics
        self.loop = user.loop
        self.user = user
        self._up: Future[bool] = Future()
        self._killed: set[int] = set()
        # For each process that closed its socket and is not reported to have ended: the seconds since then.
        self._silent: dict[int, float] = {}
        self._missing = False  # a process has ended and was not replaced yet
        # The seconds are sums of the intervals of `look`, because a blocked event loop reads no notice.
        self._silent_s = 0.0  # since the last notice of the parent
        self._none_s = 0.0  # since the last new process
        self._notices = NoticeChannel(
            parent.end,
            user.loop,
            self._take,
            self._hear,
            lambda: self.give_up("the parent of the decode processes has ended"),
        )

    def begin(self, setup: Setup, library: bytes | None) -> bool:
        """Sends the setup and the image library to the parent and waits for the first process. Call this outside
        the event loop. Returns False if none starts."""
        self._notices.send((setup, library))
        try:
            return self._up.result(START_S)
        except TimeoutError:
            self.loop.call_soon_threadsafe(self.give_up, f"no decode process was ready after {START_S:.0f} s")
            return False

    def kill(self, worker: Worker, why: Why, detail: str = "") -> None:
        """Kills a decode process and logs why. The parent replaces it."""
        worker.killed = why
        if not worker.ended:  # another process may have its number by now
            self._killed.add(worker.pid)
            kill(worker.pid)
        self._metrics.decode_processes_killed.labels(why).inc()
        fields: dict[str, object] = {"pid": worker.pid, "why": _SENTENCES[why]}
        if detail:
            fields["said"] = detail
        if worker.job is not None:
            encoded = worker.job.encoded
            seconds = round(time.monotonic() - worker.since, 3)
            about = {"format": sniff(encoded.data) or "unknown", "bytes": len(encoded.data), "s": seconds}
            fields |= {"request_id": encoded.request_id, **about}
        _logger.warning("decode process killed", extra={"fields": fields})

    def lost(self, worker: Worker) -> None:
        """Removes a process that has ended or has closed its socket, and tells the user."""
        self.workers.remove(worker)
        if not worker.ended:
            self._silent[worker.pid] = 0.0
        self._metrics.decode_processes.set(len(self.workers))
        if worker.killed is None:
            self._metrics.decode_process_deaths.inc()
        if not self._missing:
            self._missing, self._silent_s, self._none_s = True, 0.0, 0.0
        self.user.ended(worker)

    @property
    def pids(self) -> list[int]:
        """The ids of the decode processes and of their parent."""
        return [self._parent_pid, *(worker.pid for worker in self.workers)]

    @property
    def missing(self) -> bool:
        """True while a process that ended has not been replaced."""
        return self._missing and not self.over and not self.left

    def look(self, passed: float) -> None:
        """Kills processes that closed their socket but still run. Gives up if a process is missing and the parent
        is silent, or if no process could be started for too long. `passed`: seconds since the last call."""
        if not self.missing:
            return
        for pid in list(self._silent):
            self._silent[pid] += passed
            if self._silent[pid] > _GOES_ON_S:
                del self._silent[pid]
                self._killed.add(pid)
                kill(pid)
                _logger.warning(
                    "decode process killed: it closed its socket and went on", extra={"fields": {"pid": pid}}
                )
        self._silent_s += passed
        self._none_s += passed
        if self._silent_s > SILENT_S:
            self.give_up(f"the parent of the decode processes has done nothing for {SILENT_S:.0f} s")
        elif not self.workers and self._none_s > START_S:
            self.give_up(f"no process could be started for {START_S:.0f} s; the log has the cause")

    def give_up(self, why: str) -> None:
        """Ends the parent and all processes, and calls `gone` of the user; on the event loop. `why` is the reason,
        for the error."""
        if self.over:
            return
        self.over = True
        self._notices.leave()
        self._notices.close()
        self._end_parent(0)
        # Some systems do not end a process with its parent; each end closes a socket and is handled there.
        for worker in self.workers:
            kill(worker.pid)
        if not self._up.done():
            self._up.set_result(False)
        self.user.gone(why)

    def leave(self) -> None:
        """Stops to use the processes, on the event loop that goes on."""
        self.left = True
        if self.over:  # the ends of the processes close what is left
            return
        self._notices.leave()
        for worker in self.workers:
            worker.leave()
        if not self._up.done():
            self._up.set_result(False)
        self._metrics.decode_processes.set(0)

    def close(self) -> None:
        """Ends the processes and waits for the parent's end, after the event loop has stopped or after `leave`."""
        if self.over:
            return
        self.over = True
        self._notices.close()  # closed first, so that the parent replaces no process
        for worker in self.workers:
            worker.close()
        self._end_parent(_END_S)

    def _take(self, notice: Began, end: socket.socket, file: int) -> None:
        worker = Worker(notice.pid, end, file, self)
        self.workers.add(worker)
        self.user.began(worker)
        self._silent_s = self._none_s = 0.0
        if len(self.workers) >= self._count:
            self._missing = False
        self._metrics.decode_processes.set(len(self.workers))
        if not self._up.done():
            self._up.set_result(True)

    def _hear(self, notice: Notice) -> None:
        self._silent_s = 0.0
        if not isinstance(notice, Ended):
            return
        self._silent.pop(notice.pid, None)
        for worker in [each for each in self.workers if each.pid == notice.pid]:
            worker.reported_ended()
        # Already logged by `kill`; the text for SIGKILL would blame a lack of memory.
        if notice.pid in self._killed:
            self._killed.remove(notice.pid)
        else:
            fields = {"pid": notice.pid, "how": how_it_ended(notice.code)}
            _logger.warning("decode process ended", extra={"fields": fields})

    def _end_parent(self, patience: float) -> None:
        """Waits for the parent's end, and kills it after `patience` seconds."""
        until = time.monotonic() + patience
        while os.waitpid(self._parent_pid, os.WNOHANG) == (0, 0):
            if time.monotonic() >= until:
                kill(self._parent_pid)
                os.waitpid(self._parent_pid, 0)
                return
            time.sleep(0.005)


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


def kept_bytes(pid: int) -> int | None:
    """Returns the bytes of memory of another process that no file on a disk has, shared memory included: code that
    took a process over can keep bytes there, which `own_bytes` leaves out. None if the system does not report
    them."""
    try:
        counts = _KEPT.findall(Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return None
    return sum(map(int, counts)) << 10 if len(counts) == 2 else own_bytes(pid)


def threads(pid: int) -> int:
    """Returns the number of threads of another process; 0 if the system does not report it."""
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    except OSError:
        return 0


def kill(pid: int) -> None:
    """Sends SIGKILL to a process, which works for a stopped process too. Ignores a process that has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
