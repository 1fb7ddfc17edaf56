"""Does tasks in a worker process: the worker's end of the pipe, and the records that cross it.

parent  {job} ─▶ {task} ─▶ {task} …      lines of JSON on the worker's standard input
worker  {"started"} ─▶ {answer} ─▶ …     one for each, or {"error": one line}
"""

import json
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

from snapcap.warmup.errors import first_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Task = Callable[[dict[str, Any]], dict[str, Any]]


def to_json(record: "DataclassInstance") -> str:
    """Serialises a record as a single line of JSON. Members are values of JSON, paths, tuples and such records."""
    return json.dumps(asdict(record), default=str)


def from_json(kind: type[T], text: str) -> T:
    """The reverse of ``to_json``, for what only we have written."""
    record: T = _read(kind, json.loads(text))
    return record


def _read(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**{field.name: _read(field.type, value[field.name]) for field in fields(kind)})
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], each) for each in value)
    return Path(value) if value is not None and Path in (kind, *get_args(kind)) else value


def serve_tasks(job: type[T], start: Callable[[T], Task]) -> int:
    """The worker's end, all its life: ``start`` prepares for the job and returns what does each task.

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
        with suppress(PermissionError):  # a confined process, which has started nothing
            os.killpg(0, signal.SIGKILL)  # compilers too, which nobody else would end
    os._exit(1)
