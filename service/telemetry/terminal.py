"""Formats log lines and the picture of a start for a terminal. Imported only if standard error is one.

A line that is wider than the terminal is continued below, indented, and a field that is wider than a line is cut. A
pipe gets complete lines, from `logs.TextFormatter`. Colours are left out if NO_COLOR is set (no-color.org) or the
terminal is dumb.
"""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from snapcap.service.telemetry.logs import fields_of, logfmt, visible
from snapcap.warmup.progress.timeline import Phase

_WIDTH = 80  # columns, if the terminal's width is not known
_LONGEST_BAR = 48
_INDENT = " " * 9  # aligns a continued line with the text after the time
_DIM, _BOLD, _RED, _GREEN, _YELLOW, _CYAN = "2", "1", "31", "32", "33", "36"
# Fields of a request that begin its line, without their names.
_HEAD = ("method", "path", "status", "ms")
# Fields that a successful request's line leaves out: they serve to look a failure up.
_FOR_FAILURES = ("request_id", "trace_id")


def columns() -> int:
    """Returns the width of the terminal in columns."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _WIDTH
    except (OSError, ValueError):
        return _WIDTH


def paint(text: str, colour: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the text in a colour (an SGR parameter), or unchanged if colours are not wanted."""
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


class TerminalFormatter(logging.Formatter):
    """Formats a record for a terminal: `12:00:00 POST /v1/caption 200 12.3 ms client=127.0.0.1 tokens=6`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(fields_of(record))
        words = [(time.strftime("%H:%M:%S", time.localtime(record.created)), _DIM)]
        if record.levelno >= logging.WARNING:
            words.append((record.levelname.lower(), _RED if record.levelno >= logging.ERROR else _YELLOW))
        if record.getMessage() == "request" and fields.keys() >= set(_HEAD):
            words += _request(fields)
        else:
            words.append((visible(record.getMessage()), _BOLD))
            if fields.keys() == {"host", "port"}:
                words.append((address(fields.pop("host"), fields.pop("port")), _CYAN))
        words += [(f"{key}={logfmt(value)}", "") for key, value in fields.items()]
        text = _wrapped(words, columns())
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def address(host: str, port: int) -> str:
    """Returns the server's URL, which a terminal shows as a link and a browser on this machine opens."""
    anywhere = host in ("", "0.0.0.0", "::")  # noqa: S104
    name = "localhost" if anywhere else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/"


def waterfall(phases: Sequence[Phase], total: float, width: int = _WIDTH) -> str:
    """Draws the start, one line for each phase: its bar, the second in which it began and its milliseconds.

    Args:
        phases: the phases in the order in which they began. The bar of a running phase reaches the right edge.
        total: seconds from exec until ready, which are the length of the whole scale.
        width: columns of the terminal.
    """
    names = max((len(phase.name) for phase in phases), default=0)
    bar = max(8, min(_LONGEST_BAR, width - names - len("  │││ 123.456 s  123456.7 ms ")))
    return "\n".join(_line(phase, total, names, bar) for phase in phases)


def _line(phase: Phase, total: float, names: int, width: int) -> str:
    end = total if phase.end is None else min(phase.end, total)
    first = min(int(phase.start / total * width), width - 1)
    last = max(int(end / total * width), first + 1)
    bar = paint("█" * (last - first), _CYAN)
    times = f"{phase.start:7.3f} s  {1000 * (end - phase.start):8.1f} ms"
    return f"  {phase.name:<{names}} │{' ' * first}{bar}{' ' * (width - last)}│ {times}"


def _request(fields: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the words that begin the line of a request, and removes their fields."""
    method, path, status, milliseconds = (fields.pop(name) for name in _HEAD)
    if status < 400:
        for name in _FOR_FAILURES:
            fields.pop(name, None)
    colour = _GREEN if status < 400 else _YELLOW if status < 500 else _RED
    return [(str(method), ""), (logfmt(path), _BOLD), (str(status), colour), (f"{milliseconds:.1f} ms", "")]


def _wrapped(words: Sequence[tuple[str, str]], width: int) -> str:
    """Returns the words, each in its colour, in lines of at most `width` columns."""
    lines: list[list[str]] = [[]]
    used, room = 0, max(width - len(_INDENT), 20)
    for word, colour in words:
        text = word if len(word) <= room else f"{word[: room - 1]}…"
        if used and used + 1 + len(text) > width:
            lines.append([])
            used = len(_INDENT) - 1
        used += len(text) + bool(used)
        lines[-1].append(paint(text, colour) if colour else text)
    return f"\n{_INDENT}".join(" ".join(line) for line in lines)
