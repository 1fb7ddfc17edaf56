"""Writes log lines on standard error: one a phase and one a request, as text or JSON.

The lines of requests that went well are written a moment later, many at once: each write is a system call, which
lets go of Python's lock, and under load the event loop would wait for it at every request. All others are written
at once, behind those that came before them.

A record may carry `extra={"fields": {...}}`: further members of the JSON line, `key=value` in the text line, quoted
and escaped where logfmt asks for it: nothing that a client sends can end a line or begin a field. Numbers have at
most three places behind the point.
"""

import json
import logging
import math
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

ACCESS = "snapcap.access"
# What a value may be without quotes; else quotes, backslashes and what is no visible character are escaped.
_PLAIN = re.compile(
    r"[!#-<>-\[\]-~\u00a1-\u00ac\u00ae-\u061b\u061d-\u1fff\u2010-\u2027\u2030-\u205f\u2070-\ud7ff]+"
)
# No visible character, those that turn the direction of text among them.
_INVISIBLE = r"\x00-\x1f\x7f-\xa0\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
_ESCAPED = re.compile(rf'["\\{_INVISIBLE}]')
_NOT_SHOWN = re.compile(rf"[{_INVISIBLE}]")
_ESCAPES = {'"': r"\"", "\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
DELAY_S = 0.05
# That wait for whoever reads standard error; then the lines of requests are left out, and their number is said.
MOST_WAITING = 10_000
# Lowest level of each logger; None: what the configuration says. Broken multipart bodies are the client's matter,
# and so are headers about traces, of which each would be a line, written before anybody is known.
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
    """Sends the logs of snapcap and of the libraries under it to standard error. `style`: text or json."""
    # No line of ours names them, and to find them costs a request more than its line (logging's own advice).
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
    """To standard error. Lines of ``snapcap.access`` below a warning wait for up to ``DELAY_S``."""

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
        """Write what waits."""
        with self._owned():
            records = [self._waiting.popleft() for _ in range(len(self._waiting))]
            try:
                if records:
                    if left_out := self._left_out:
                        self._left_out -= left_out
                        records.append(_lines_left_out(left_out))
                    self.stream.write("".join(f"{self.format(record)}\n" for record in records))
                    super().flush()
            except Exception:
                self.handleError(records[-1])

    @contextmanager
    def _owned(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
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
    """2026-01-31T12:00:00.123Z info    POST /v1/caption 200 12.3 ms request_id=…"""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={logfmt(value)}" for key, value in fields_of(record).items())
        line = f"{_timestamp(record)} {record.levelname.lower():<7} {visible(record.getMessage())}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the fields, and `exception` where there is one."""

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
    """A value, quoted and escaped where it has to be."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, int):
        return ("true" if value else "false") if isinstance(value, bool) else str(value)
    text = str(value)
    if text.isalnum() or _PLAIN.fullmatch(text):
        return text
    return f'"{_ESCAPED.sub(_escape, text)}"'


def visible(message: str) -> str:
    """A message in one line: a library's may hold what a client has sent."""
    return _NOT_SHOWN.sub(_escape, message)


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    return _ESCAPES.get(character) or f"\\u{ord(character):04x}"


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"
