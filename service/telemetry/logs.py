"""Writes log lines to standard error, one for each phase of the start and each caption request, as text or JSON.

The lines of successful requests are collected for a moment and written together: each write is a system call, which
releases Python's lock, and under load the event loop would wait for the lock at every request. Every other line is
written at once, after the lines that were collected before it.

A record may carry `extra={"fields": {...}}`. The fields are members of the JSON line, and `key=value` in the text
line, quoted and escaped as logfmt requires, so that no text of a client can end a line or begin a field. Numbers
have at most three decimal places.
"""

import json
import logging
import math
import re
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

ACCESS = "snapcap.access"
# A value of these characters alone needs no quotes. In any other value, quotes, backslashes and invisible
# characters are escaped.
_PLAIN = re.compile(
    r"[!#-<>-\[\]-~\u00a1-\u00ac\u00ae-\u061b\u061d-\u1fff\u2010-\u2027\u2030-\u205f\u2070-\ud7ff]+"
)
# Characters that are not visible, including those that change the direction of text.
_INVISIBLE = r"\x00-\x1f\x7f-\xa0\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
_ESCAPED = re.compile(rf'["\\{_INVISIBLE}]')
_NOT_SHOWN = re.compile(rf"[{_INVISIBLE}]")
_ESCAPES = {'"': r"\"", "\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
DELAY_S = 0.05
# Number of collected lines from which on lines of successful requests are dropped, and counted in a line of their
# own, because standard error is read too slowly.
MOST_WAITING = 10_000
# Lowest level of each logger; None stands for --log-level. Broken multipart bodies and trace headers are faults of
# clients, and each would write a line before the client's key is checked.
_LOGGERS = {
    "snapcap": None,
    "uvicorn.error": "WARNING",
    "python_multipart": "ERROR",
    "opentelemetry": "WARNING",
    "opentelemetry.trace": "ERROR",
    "opentelemetry.baggage": "ERROR",
    "opentelemetry.propagators": "ERROR",
}


def configure(style: str, level: str) -> None:
    """Sends the logs of snapcap and of its libraries to standard error. `style` is text or json."""
    warnings.filterwarnings("ignore", module=r"PIL\.")  # Pillow warns of damaged parts of a client's picture
    # No line names its thread or process, and finding them costs more than writing the line (logging's own advice).
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = LineHandler()
    handler.setFormatter(_formatter(style))
    for name, lowest in _LOGGERS.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(lowest or level.upper())
        logger.propagate = False


def _formatter(style: str) -> logging.Formatter:
    if style == "json":
        return JsonFormatter()
    if sys.stderr is not None and sys.stderr.isatty():
        from snapcap.service.telemetry.terminal import TerminalFormatter  # noqa: PLC0415 - servers have none

        return TerminalFormatter()
    return TextFormatter()


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes records to standard error. Records of ``snapcap.access`` below a warning wait up to ``DELAY_S``
    seconds, to be written together."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[logging.LogRecord] = deque()
        self._left_out = 0
        self._due = threading.Event()
        self._thread: threading.Thread | None = None

    def handle(self, record: logging.LogRecord) -> bool:
        if record.name != ACCESS or record.levelno >= logging.WARNING:
            return super().handle(record)
        if len(self._waiting) >= MOST_WAITING:
            self._left_out += 1
            return True
        self._waiting.append(record)
        if not self._due.is_set():
            self._due.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_later, name="log", daemon=True)
                self._thread.start()
        return True

    def emit(self, record: logging.LogRecord) -> None:
        self._waiting.append(record)
        self.flush()

    def flush(self) -> None:
        """Writes the collected records."""
        records: list[logging.LogRecord] = []
        self.acquire()
        try:
            records += [self._waiting.popleft() for _ in range(len(self._waiting))]
            if records:
                if left_out := self._left_out:
                    self._left_out -= left_out
                    records.append(_lines_left_out(left_out))
                # Looked up for each line: a progress bar replaces it, to draw lines above the bar.
                sys.stderr.write("".join(f"{self.format(record)}\n" for record in records))
                sys.stderr.flush()
        except Exception:
            self.handleError(records[-1])
        finally:
            self.release()

    def _write_later(self) -> None:
        while self._due.wait():
            time.sleep(DELAY_S)
            self._due.clear()
            self.flush()


def _lines_left_out(count: int) -> logging.LogRecord:
    record = logging.LogRecord(ACCESS, logging.WARNING, "", 0, "lines of requests were left out", None, None)
    record.fields = {"lines": count, "why": "standard error is read too slowly"}
    return record


class TextFormatter(logging.Formatter):
    """Formats a record as a line of logfmt: `2026-01-31T12:00:00.123Z info    request method=POST status=200 …`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={logfmt(value)}" for key, value in fields_of(record).items())
        line = f"{_timestamp(record)} {record.levelname.lower():<7} {visible(record.getMessage())}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object on one line: time, level, logger, message, the record's fields, and
    `exception` if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{key: _rounded(value) for key, value in fields_of(record).items()},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def _rounded(value: object) -> object:
    if not isinstance(value, float):
        return value
    return round(value, 3) if math.isfinite(value) else str(value)  # JSON has no infinity


def logfmt(value: object) -> str:
    """Returns a value as logfmt has it: quoted and escaped if necessary."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, int):
        return ("true" if value else "false") if isinstance(value, bool) else str(value)
    text = str(value)
    if text.isalnum() or _PLAIN.fullmatch(text):
        return text
    return f'"{_ESCAPED.sub(_escape, text)}"'


def visible(message: str) -> str:
    """Returns a message as one line, because a library's message may hold text of a client."""
    return _NOT_SHOWN.sub(_escape, message)


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    return _ESCAPES.get(character) or f"\\u{ord(character):04x}"


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"
