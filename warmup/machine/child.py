"""Runs a child process that answers JSON lines, with the code of both ends of the pipe.

The work is compiled code and compilers, either of which may crash its process; the parent must live on, know
what was being worked on, and go on with the rest.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from snapcap.warmup.machine.own_imports import child_environment, python_module

Task = Callable[[dict[str, Any]], dict[str, Any]]


_LINE_LIMIT = 1_000_000  # characters of an answer; one is a few thousand
_LOWEST = 19


class ChildError(RuntimeError):
    """The child ended without an answer; one line that says how."""


class ChildTimeoutError(ChildError):
    """It did not answer in time, and was ended."""


def serve_lines(start: Callable[[dict[str, Any]], Task]) -> int:
    """The child's end: the first line is the job, every further line one task; one line is answered to each.

    Whatever else prints to standard output, compilers among them, goes to standard error. When the input is closed,
    who asked is gone, however it ended: this process ends at once, with what it has started.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(lines,), name="tasks", daemon=True).start()

    def answer(value: Mapping[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        task = start(json.loads(lines.get()))
        answer({"started": True})
    except Exception as error:
        answer({"error": one_line(error)})
        return 1
    while True:
        try:
            answer(task(json.loads(lines.get())))
        except BrokenPipeError:
            return 1
        except Exception as error:
            traceback.print_exc()
            answer({"error": one_line(error)})


def _read_lines(lines: "queue.SimpleQueue[bytes]") -> None:
    # Not sys.stdin, whose lock the interpreter would want as it ends.
    with open(0, "rb", closefd=False) as asked:
        for line in asked:
            lines.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # compilers too, which nobody else would end
    os._exit(1)


def one_line(error: BaseException) -> str:
    """What a compiler's error says: its first line, and the line of ours that it is about."""
    text = str(error).strip()
    # Export errors are pages long; their first line says what, and "from user code" shows the region's line.
    place = text[text.rfind("File ") :].splitlines()[:2] if "File " in text else []
    first = text.splitlines()[0] if text else type(error).__name__
    return " — ".join([first, *(" ".join(part.split()) for part in place)])[:2000]


class Child:
    """The parent's end: a process that leads a group of its own, with which it is ended.

    A key on the terminal is the parent's to answer, and a parent that dies takes the group along: its end of the
    child's input is closed.
    """

    def __init__(
        self,
        module: str,
        job: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        nice: int = 0,
    ) -> None:
        """``python -m module`` with variables added to this process's; ``nice`` lowers its priority (0 to 19)."""
        self._module = module
        self._job = job
        self._environment = dict(environment or {})
        self._nice = nice
        self._process: subprocess.Popen[str] | None = None
        self._lock = (
            threading.Lock()
        )  # of what follows, and of reaping: a number that is free may be another's soon
        self._ended = False
        self._asked = 0
        self._overdue = False
        self._last_errors: list[str] = []
        self._reader = threading.Thread(target=self._keep_errors, daemon=True)

    def start(self, limit: float) -> None:
        """Start the process and send it its job, for which it has ``limit`` seconds.

        Raises:
            ChildError: it could not begin, or it was ended before it began.
            OSError: there can be no further process.
        """
        with self._lock:
            if self._ended:
                raise ChildError(f"{self._module} was ended before it began")
            self._process = process = subprocess.Popen(  # noqa: S603  this interpreter and a module of ours
                python_module(self._module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=child_environment(self._environment),
                # Not a session: Linux may share a CPU among sessions, whose processes' priorities then count for
                # nothing beside other sessions.
                process_group=0,
            )
        if self._nice:
            with contextlib.suppress(OSError):  # it has ended
                own = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PROCESS, process.pid, min(own + self._nice, _LOWEST))
        self._reader.start()
        self.ask(self._job, limit)

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._ended

    def ask(self, task: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """Send one line and wait for its answer.

        Raises:
            ChildTimeoutError: there was none within ``limit`` seconds; the child was ended.
            ChildError: the child ended, or answered with an error; says why.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise ChildError(f"{self._module} is not running")
        timer = threading.Timer(limit, self._run_out, (self._asked,))
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            line = process.stdout.readline(_LINE_LIMIT)
        except (OSError, ValueError):  # closed, by it or by us
            line = ""
        if not line.endswith("\n"):
            _wait_unreaped(process.pid)
        with self._lock:
            self._asked += 1  # too late for the timer
        timer.cancel()
        if self._overdue:
            raise ChildTimeoutError(f"{self._module} took more than {limit:g} s and was ended")
        if not line.endswith("\n"):
            self.kill()
            raise ChildError(f"{self._module} ended with {_ending(process.wait())}{self._tail()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise ChildError(f"{self._module} answered with something else than JSON") from None
        if "error" in answer:
            raise ChildError(str(answer["error"]))
        return answer

    def kill(self) -> None:
        """End the child and what it has started, from any thread; a running ``ask`` raises ChildError."""
        with self._lock:
            self._kill()

    def _run_out(self, asked: int) -> None:
        with self._lock:
            if asked == self._asked:
                self._overdue = True
                self._kill()

    def _kill(self) -> None:
        """With the lock held."""
        self._ended = True
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # compilers outlive it by seconds, or for ever
            process.wait()

    def _keep_errors(self) -> None:
        stream = self._process.stderr if self._process else None
        while stream is not None and (line := stream.readline(_LINE_LIMIT)):
            self._last_errors = [*self._last_errors[-9:], line.rstrip()]

    def _tail(self) -> str:
        self._reader.join(1)
        lines = [line for line in self._last_errors if line]
        return f": {lines[-1]}" if lines else ""


def _wait_unreaped(pid: int) -> None:
    """Until a process has ended by itself, so that ending its group does not become its cause; it can be waited for
    afterwards."""
    if hasattr(os, "waitid"):
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"
