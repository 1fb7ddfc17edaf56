"""Runs tasks in a worker process, one after the other, and bounds how long a caller waits for work.

parent  {job} ─▶ {task} ─▶ {task} …      lines of JSON on the worker's standard input
worker  {"started"} ─▶ {answer} ─▶ …     one line for each task, or {"error": one line}

Workers run compiled code, compilers and downloads, which may crash or hang. The parent survives this, knows which
task failed, and continues with the other tasks.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeVar

from snapcap.models.dataclass import dataclass
from snapcap.models.json_object import from_json, to_json
from snapcap.warmup.errors import first_line
from snapcap.warmup.machine.denied import report_denied
from snapcap.warmup.machine.own_imports import child_environment, python_module

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Task = Callable[[dict[str, Any]], dict[str, Any]]


def serve_tasks(job: type[T], start: Callable[[T], Task]) -> int:
    """Runs a worker process: ``start`` prepares for the job, and returns the function that does each task.

    Other output to standard output, such as a compiler's, is redirected to standard error. When the parent ends,
    the input is closed: this process then ends at once, with all its child processes."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(lines,), name="tasks", daemon=True).start()

    def answer(value: Mapping[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        task = start(from_json(job, lines.get().decode()))
        answer({"started": True})
    except Exception as error:
        answer({"error": first_line(error)})
        return 1
    while True:
        try:
            value = task(json.loads(lines.get()))
        except Exception as error:
            traceback.print_exc()
            value = {"error": first_line(error)}
        try:
            answer(value)
        except BrokenPipeError:
            return 1


def _read_lines(lines: "queue.SimpleQueue[bytes]") -> None:
    # Not sys.stdin, whose lock the interpreter would want as it ends.
    with open(0, "rb", closefd=False) as asked:
        for line in asked:
            lines.put(line)
    if os.getpgrp() == os.getpid():
        with suppress(PermissionError):  # a confined process may not signal, and has no children
            os.killpg(0, signal.SIGKILL)  # the whole group, because nothing else would end its compilers
    os._exit(1)


_LINE_LIMIT = 1_000_000  # most characters of an answer; a usual answer has a few thousand
_MOST_SAID = 64 << 10  # most characters that an untrusted worker may write to standard error for one task
LOWEST_PRIORITY = 19
_ERROR_LINES = 10
_LONGEST_REASON = 2000
_LAST_WORDS_S = 2.0  # seconds that a worker may take to end after it has closed its output
_REAPING_S = 2.0


class WorkerError(RuntimeError):
    """Says in one line why a worker did not do its task: no start, no answer, or an error."""


class WorkerTimeoutError(WorkerError):
    """Says that a worker did not answer in time, and was ended."""


@dataclass(eq=False)
class Worker:
    """Controls a worker process from the parent. The worker leads its own process group, which is ended as a whole.
    A context manager.

    The first task starts the process, and so does the first task after its death. Signals of the terminal's keys
    reach only the parent. If the parent dies, the worker's input is closed, and the group ends.

    ``module``: run with ``python -m``; it calls ``serve_tasks``. ``job``: the first message to the process.
    ``environment``: variables added to this process's. ``nice`` lowers the priority (0 to 19). ``trusted``: the
    worker gets all of this process's variables, including secrets."""

    module: str
    job: "DataclassInstance"
    environment: Mapping[str, str] = field(default_factory=dict)
    nice: int = 0
    trusted: bool = True

    def __post_init__(self) -> None:
        self._said = 0  # characters on standard error since the last task
        self._process: subprocess.Popen[str] | None = None
        self._begun = False  # the process has received the job
        # Guards the members below and the reaping of the process: a free process id may soon belong to another
        # process.
        self._lock = threading.Lock()
        self._stopped = False
        self._asked = 0
        self._overdue = False
        self._last_errors: deque[str] = deque(maxlen=_ERROR_LINES)
        self._reader: threading.Thread | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The id of the process; None if there is none."""
        process = self._process  # another thread may set it to None by ``stop``
        return None if process is None else process.pid

    def _variables(self) -> dict[str, str]:
        if self.trusted:
            return child_environment(self.environment)
        from snapcap.warmup.machine.confined import clean_environment  # noqa: PLC0415  for few workers

        return {**clean_environment(child_environment()), **self.environment}

    def launch(self) -> None:
        """Start the process if none runs, so that it imports its modules before the job is sent. Does not wait."""
        if self._process is None:
            with contextlib.suppress(WorkerError):  # `start` raises the error again
                self._spawn()

    def start(self, limit: float) -> None:
        """Start the process, if none runs, and wait until it is prepared for the job, at most ``limit`` seconds.
        Raises WorkerError as ``ask`` does."""
        process = self._process  # another thread may set it to None by ``stop``
        if process is not None and _has_ended(process.pid):
            self._end()  # the process died while it was idle
        elif process is not None and self._begun:
            return
        with self._within(limit):
            process = self._process or self._spawn()
            try:
                self._exchange(process, to_json(self.job))
                self._begun = True
            except WorkerError:
                self._end()  # a process that could not begin serves no task
                raise

    def ask(self, task: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """Send a task and return the answer. The task may take ``limit`` seconds, and a start before it as many.
        Call this from one thread at a time. Raises WorkerTimeoutError if the process did not answer in time, and
        was ended, and WorkerError if the process could not be started, ended, or answered with an error; the text
        says why."""
        self.start(limit)
        with self._within(limit):
            process = self._process
            if process is None:
                raise WorkerError(f"{self.module} was ended")
            return self._exchange(process, json.dumps(task))

    @contextlib.contextmanager
    def _within(self, limit: float) -> Iterator[None]:
        """End the process if the block takes longer than ``limit`` seconds."""
        self._overdue = False
        timer = threading.Timer(limit, self._run_out, (self._asked,))
        timer.daemon = True
        timer.start()
        try:
            yield
        except WorkerError:
            if self._overdue:
                raise WorkerTimeoutError(f"{self.module} took more than {limit:g} s and was ended") from None
            raise
        finally:
            with self._lock:
                self._asked += 1  # too late for the timer
            timer.cancel()

    def kill(self) -> None:
        """End the process for good, from any thread, without waiting. To end several workers, kill all of them
        before the first ``stop``, which waits."""
        with self._lock:
            self._stopped = True
            self._signal()

    def stop(self) -> None:
        """End the process group for good, from any thread, and wait. A running ``ask`` raises WorkerError."""
        with self._lock:
            self._stopped = True
            self._signal_and_reap()

    def _spawn(self) -> "subprocess.Popen[str]":
        with self._lock:
            if self._stopped or self._overdue:
                raise WorkerError(f"{self.module} was ended before it began")
            try:
                process = subprocess.Popen(  # noqa: S603  this interpreter and a module of ours
                    python_module(self.module),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    encoding="utf-8",
                    errors="replace",
                    env=self._variables(),
                    # No new session: Linux may divide a CPU between sessions, and then ignores priorities between
                    # processes of different sessions.
                    process_group=0,
                )
            except OSError as error:
                raise WorkerError(f"cannot start {self.module}: {error.strerror}") from None
            self._process, self._begun = process, False
        if self.nice:
            try:
                own = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PROCESS, process.pid, min(own + self.nice, LOWEST_PRIORITY))
            except ProcessLookupError:  # the process has ended
                pass
            except OSError as error:
                effect = "processes beside a server have its priority"
                report_denied("setpriority", effect, str(error.strerror))
        self._last_errors.clear()
        self._reader = threading.Thread(target=self._keep_errors, args=(process,), daemon=True)
        self._reader.start()
        return process

    def _exchange(self, process: "subprocess.Popen[str]", question: str) -> dict[str, Any]:
        """Send one line and return the answer."""
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("a worker has pipes")
        self._said = 0
        try:
            process.stdin.write(question + "\n")
            process.stdin.flush()
            line = process.stdout.readline(_LINE_LIMIT)
        except (OSError, ValueError):  # either side has closed the pipe
            line = ""
        if len(line) == _LINE_LIMIT:
            self._end()
            raise WorkerError(f"{self.module} answered with more than {_LINE_LIMIT} characters")
        if not line.endswith("\n"):
            _wait_unreaped(process.pid)
            self._end()
            raise WorkerError(f"{self.module} ended with {_ending(process.returncode)}{self._tail()}")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            self._end()  # its next line could belong to any task
            raise WorkerError(f"{self.module} answered with something else than a JSON object")
        if "error" in answer:
            raise WorkerError(_short(str(answer["error"])))
        return answer

    def _run_out(self, asked: int) -> None:
        with self._lock:
            if asked == self._asked:
                self._overdue = True
                self._signal_and_reap()

    def _end(self) -> None:
        with self._lock:
            self._signal_and_reap()

    def _signal_and_reap(self) -> None:
        """Kills the process group and reaps the process. The caller holds the lock."""
        self._signal()
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(_REAPING_S)
            except subprocess.TimeoutExpired:  # stuck in a driver or on a disk: not waited for
                threading.Thread(target=process.wait, name="reap", daemon=True).start()

    def _signal(self) -> None:
        """Kills the process group. The caller holds the lock."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # otherwise its compilers would go on

    def _keep_errors(self, process: "subprocess.Popen[str]") -> None:
        while process.stderr is not None and (line := process.stderr.readline(_LINE_LIMIT)):
            self._said += len(line)
            if self._said > _MOST_SAID and not self.trusted:
                self._last_errors.append(f"it wrote more than {_MOST_SAID} characters to standard error")
                process.kill()
                return
            if line := line.rstrip():
                self._last_errors.append(line)

    def _tail(self) -> str:
        if self._reader is not None:
            self._reader.join(1)
        return f": {_short(self._last_errors[-1])}" if self._last_errors else ""


def _wait_unreaped(pid: int) -> None:
    """Wait until a process has ended by itself, so that killing its group does not hide the real exit status. Waits
    at most ``_LAST_WORDS_S`` seconds, and does not reap the process."""
    end = time.monotonic() + _LAST_WORDS_S
    while not _has_ended(pid) and time.monotonic() < end:
        time.sleep(0.01)


def _has_ended(pid: int) -> bool:
    """Returns whether a child has ended, without reaping it. Returns False if the system cannot say."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def _short(text: str) -> str:
    """Shortens a worker's text to a single line of bounded length."""
    return " ".join(text.split())[:_LONGEST_REASON]


def _ending(code: int | None) -> str:
    if code is None:
        return "no status, though it was killed"
    return f"signal {-code}" if code < 0 else f"status {code}"


def within(seconds: float, work: Callable[[], T], name: str) -> T:
    """Does work on another thread. Raises TimeoutError after ``seconds``, and abandons the thread."""
    return begin(work, name).result(seconds)


def begin(work: Callable[[], T], name: str) -> "Future[T]":
    """Begins work on a new daemon thread. Returns the future of its result."""
    future: Future[T] = Future()
    threading.Thread(target=fulfil, args=(future, work), name=name, daemon=True).start()
    return future


def fulfil(future: "Future[T]", work: Callable[[], T]) -> None:
    """Does work, and stores its result or its exception in a future."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
