"""Log lines on standard error: one a phase and one a request, as text or JSON.

A record may carry `extra={"fields": {...}}`: further members of the JSON line, `key=value` in the text line.
"""

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

# Lowest level of each logger; None: what the configuration says. Broken multipart bodies are the client's matter.
_LOGGERS = {"snapcap": None, "uvicorn.error": "WARNING", "python_multipart": "ERROR"}


def configure(style: str, level: str) -> None:
    """Sends the logs of snapcap and of the libraries under it to standard error. `style`: text or json."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    for name, lowest in _LOGGERS.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(lowest or level.upper())
        logger.propagate = False


class TextFormatter(logging.Formatter):
    """2026-01-31T12:00:00.123Z info    POST /v1/caption 200 12.3 ms request_id=…"""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={_text(value)}" for key, value in _fields(record).items())
        line = f"{_timestamp(record)} {record.levelname.lower():<7} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the fields, and `exception` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"
