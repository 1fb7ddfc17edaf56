"""A child process that answers JSON lines: both ends of the pipe.

The work is compiled code and compilers, either of which may crash its process; the parent must live on, know
what was being worked on, and go on with the rest.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Task = Callable[[dict[str, Any]], dict[str, Any]]


class ChildError(RuntimeError):
    """The child ended without an answer; one line that says how."""


def serve_lines(start: Callable[[dict[str, Any]], Task]) -> int:
    """The child's end: the first line is the job, every further line one task; one line is answered to each.

    Whatever else prints to standard output, compilers among them, goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: Mapping[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        task = start(json.loads(sys.stdin.readline()))
        answer({"started": True})
    except Exception as error:
        answer({"error": one_line(error)})
        return 1
    for line in sys.stdin:
        try:
            answer(task(json.loads(line)))
        except Exception as error:
            traceback.print_exc()
            answer({"error": one_line(error)})
    return 0


def one_line(error: BaseException) -> str:
    """What a compiler's error says: its first line, and the line of ours that it is about."""
    text = str(error).strip()
    # Export errors are pages long; their first line says what, and "from user code" shows the region's line.
    place = text[text.rfind("File ") :].splitlines()[:2] if "File " in text else []
    first = text.splitlines()[0] if text else type(error).__name__
    return " — ".join([first, *(" ".join(part.split()) for part in place)])[:2000]


class Child:
    """The parent's end. A child whose parent dies ends with its current task, as its input is closed."""

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
        self._last_errors: list[str] = []

    def start(self) -> None:
        """Start the process and send it its job.

        Raises:
            ChildError: it could not begin.
        """
        command = [sys.executable, "-m", self._module]
        if self._nice and shutil.which("nice"):
            command = ["nice", "-n", str(self._nice), *command]
        self._process = subprocess.Popen(  # noqa: S603  this interpreter and a module of ours
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **self._environment},
        )
        threading.Thread(target=self._keep_errors, args=(self._process,), daemon=True).start()
        self.ask(self._job)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Send one line and wait for its answer.

        Raises:
            ChildError: the child ended, or answered with an error; says why.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise ChildError(f"{self._module} is not running")
        try:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise ChildError(f"{self._module} ended with {_ending(process.wait())}{self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildError(str(answer["error"]))
        return answer

    def kill(self) -> None:
        """End the child, from any thread; a running ``ask`` raises ChildError."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _keep_errors(self, process: "subprocess.Popen[str]") -> None:
        for line in process.stderr or ():
            self._last_errors = [*self._last_errors[-9:], line.rstrip()]

    def _tail(self) -> str:
        lines = [line for line in self._last_errors if line]
        return f": {lines[-1]}" if lines else ""


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"
