"""Follows the decode processes and their parent in the HTTP process, and says when none will be forked again.

A parent that has ended takes the others with it; one that hangs replaces none that dies. Neither can be forked
again from a process with threads, so it is said, and the server ends.
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
# The parent says within milliseconds that one has ended, and once a second that it cannot start another.
SILENT_S = 10.0
_END_S = 5.0
# The parent says within milliseconds that a process has ended: one that closed its socket and is not said to have
# ended after so many seconds still runs.
_GOES_ON_S = 1.0
_logger = logging.getLogger("snapcap.decode")


class ImageProcessFamily:
    """`began`: called with the number of a new process, the socket to it and the file of its pixels. `gone`: called
    once, with the reason, when no process will come any more."""

    def __init__(
        self,
        processes: ImageProcesses,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
        began: Callable[[int, socket.socket, int], Worker],
        gone: Callable[[str], object],
    ) -> None:
        self.workers: set[Worker] = set()
        self.over = False  # no process will come any more
        self._parent_pid = processes.parent.pid
        self._count = processes.count
        self._metrics = metrics
        self._loop = loop
        self._began = began
        self._gone = gone
        self._up: Future[bool] = Future()
        self._killed: set[int] = set()
        # Seconds since a process closed its socket, for each that is not said to have ended.
        self._silent: dict[int, float] = {}
        # Seconds as `look` counts them: while this loop stood still nothing could be heard.
        self._missing = False  # a process has ended that was not replaced yet
        self._silent_s = 0.0  # since the parent was heard
        self._none_s = 0.0  # since a process began
        self._notices = NoticeChannel(
            processes.parent.end,
            loop,
            self._take,
            self._hear,
            lambda: self.give_up("the process that starts those that decode has ended"),
        )

    def begin(self, setup: Setup) -> bool:
        """Let them begin, and wait for the first; not on the event loop. False when there is none."""
        self._notices.send(setup)
        try:
            return self._up.result(START_S)
        except TimeoutError:
            self._loop.call_soon_threadsafe(self.give_up, f"no process was there after {START_S:.0f} s")
            return False

    def kill(self, worker: Worker, why: Why, detail: str = "") -> None:
        """It is replaced once its end is heard."""
        worker.killed = why
        self._killed.add(worker.pid)
        if not worker.ended:  # another process may have its number by now
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
        """The process has ended, or has closed its socket."""
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
        """Whether one has ended that was not replaced yet."""
        return self._missing and not self.over

    def look(self, passed: float) -> None:
        """Kill a process that closed its socket and goes on. Give up where nothing is heard of a parent that should
        replace a process, or where no process can be started. `passed`: seconds between two looks."""
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
        """End them all; on the event loop."""
        if self.over:
            return
        self.over = True
        self._notices.close()
        self._end_parent(0)
        for worker in self.workers:  # where the kernel does not end them with their parent; their ends are heard
            kill(worker.pid)
        if not self._up.done():
            self._up.set_result(False)
        self._gone(why)

    def close(self) -> None:
        """End the processes, and wait until they have ended. The event loop is over by now."""
        if self.over:
            return
        self.over = True
        self._notices.shut()  # first, so that their parent replaces none of them
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
        if notice.pid in self._killed:  # which has its line; a SIGKILL would be read as a want of memory
            self._killed.remove(notice.pid)
        else:
            fields = {"pid": notice.pid, "how": how_it_ended(notice.code)}
            _logger.warning("decode process ended", extra={"fields": fields})

    def _end_parent(self, patience: float) -> None:
        """Wait for its end, and kill it when that does not come in so many seconds."""
        until = time.monotonic() + patience
        while os.waitpid(self._parent_pid, os.WNOHANG) == (0, 0):
            if time.monotonic() >= until:
                kill(self._parent_pid)
                os.waitpid(self._parent_pid, 0)
                return
            time.sleep(0.005)
