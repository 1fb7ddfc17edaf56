"""Follows the decode processes and their parent in the HTTP process, and reports when none will be forked again.

When the parent ends, the decode processes end too. When the parent hangs, dead processes are not replaced. The
HTTP process has threads, so it cannot fork a new parent: it reports the failure, and the server ends.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future

from snapcap.models.processing.image_formats import sniff
from snapcap.service.images.processes.fork import ImageProcesses
from snapcap.service.images.processes.messages import Began, Ended, Notice, Setup
from snapcap.service.images.processes.notice_channel import NoticeChannel
from snapcap.service.images.processes.worker_handle import Worker, kill
from snapcap.service.ipc.fork import how_it_ended
from snapcap.service.telemetry.metrics import Metrics
from snapcap.service.telemetry.reasons import SENTENCES, Why

START_S = 30.0
# Seconds without a notice after which the parent counts as hung, if a process is missing. The parent reports the
# end of a process within milliseconds, and once a second that it cannot start another.
SILENT_S = 10.0
_END_S = 5.0
# Seconds after which a process that closed its socket is killed. The parent reports the end of a process within
# milliseconds, so this process is still running.
_GOES_ON_S = 1.0
_logger = logging.getLogger("snapcap.decode")


class ImageProcessFamily:
    """Tracks the decode processes. `began`: called with a new process's pid, its socket and the file of its
    pixels. `gone`: called once, with the reason, when no process will be started any more."""

    def __init__(
        self,
        processes: ImageProcesses,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
        began: Callable[[int, socket.socket, int], Worker],
        gone: Callable[[str], object],
    ) -> None:
        self.workers: set[Worker] = set()
        self.over = False  # no process will be started any more
        self._parent_pid = processes.parent.pid
        self._count = processes.count
        self._metrics = metrics
        self._loop = loop
        self._began = began
        self._gone = gone
        self._up: Future[bool] = Future()
        self._killed: set[int] = set()
        # For each process that closed its socket and is not reported to have ended: the seconds since then.
        self._silent: dict[int, float] = {}
        self._missing = False  # a process has ended and was not replaced yet
        # The seconds are sums of the intervals of `look`, because a blocked event loop reads no notice.
        self._silent_s = 0.0  # since the last notice of the parent
        self._none_s = 0.0  # since the last new process
        self._notices = NoticeChannel(
            processes.parent.end,
            loop,
            self._take,
            self._hear,
            lambda: self.give_up("the process that starts those that decode has ended"),
        )

    def begin(self, setup: Setup) -> bool:
        """Sends the setup to the parent and waits for the first process. Call this outside the event loop. Returns
        False if none starts."""
        self._notices.send(setup)
        try:
            return self._up.result(START_S)
        except TimeoutError:
            self._loop.call_soon_threadsafe(self.give_up, f"no process was there after {START_S:.0f} s")
            return False

    def kill(self, worker: Worker, why: Why, detail: str = "") -> None:
        """Kills a decode process and logs why. The parent replaces it."""
        worker.killed = why
        if not worker.ended:  # another process may have its number by now
            self._killed.add(worker.pid)
            kill(worker.pid)
        self._metrics.decode_processes_killed.labels(why).inc()
        fields: dict[str, object] = {"pid": worker.pid, "why": SENTENCES[why]}
        if detail:
            fields["said"] = detail
        if worker.job is not None:
            encoded = worker.job.encoded
            seconds = round(time.monotonic() - worker.since, 3)
            about = {"format": sniff(encoded.data) or "unknown", "bytes": len(encoded.data), "s": seconds}
            fields |= {"request_id": encoded.request_id, **about}
        _logger.warning("decode process killed", extra={"fields": fields})

    def lost(self, worker: Worker) -> None:
        """Removes a process that has ended or has closed its socket."""
        self.workers.remove(worker)
        os.close(worker.file)
        if not worker.ended:
            self._silent[worker.pid] = 0.0
        self._metrics.decode_processes.set(len(self.workers))
        if worker.killed is None:
            self._metrics.decode_process_deaths.inc()
        if not self._missing:
            self._missing, self._silent_s, self._none_s = True, 0.0, 0.0

    @property
    def missing(self) -> bool:
        """True while a process that ended has not been replaced."""
        return self._missing and not self.over

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
            self.give_up(f"the process that starts those that decode has done nothing for {SILENT_S:.0f} s")
        elif not self.workers and self._none_s > START_S:
            self.give_up(f"no process could be started for {START_S:.0f} s; the log has the cause")

    def give_up(self, why: str) -> None:
        """Ends the parent and all processes, and calls `gone`; on the event loop."""
        if self.over:
            return
        self.over = True
        self._notices.close()
        self._end_parent(0)
        # Some systems do not end a process with its parent; each end closes a socket and is handled there.
        for worker in self.workers:
            kill(worker.pid)
        if not self._up.done():
            self._up.set_result(False)
        self._gone(why)

    def close(self) -> None:
        """Ends the processes and waits for the parent's end, after the event loop has stopped."""
        if self.over:
            return
        self.over = True
        self._notices.shut()  # closed first, so that the parent replaces no process
        for worker in self.workers:
            worker.channel.shut()
            os.close(worker.file)
        self._end_parent(_END_S)

    def _take(self, notice: Began, end: socket.socket, file: int) -> None:
        self.workers.add(self._began(notice.pid, end, file))
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
            worker.ended = True
            worker.channel.end()
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
