"""Writes the log line of a request, from the notes of the code that handled it."""

import logging
import time
from collections.abc import Callable

from starlette.types import Scope

from snapcap.service.api.middleware.request_id import request_id, trace_id
from snapcap.service.captioning.times import CaptionTimes
from snapcap.service.errors import ServiceError
from snapcap.service.limits import REJECTED
from snapcap.service.telemetry.logs import ACCESS

# Seconds between two log lines of a probe that keeps getting 503.
SECONDS_BETWEEN_PROBES = 60.0
_CAPTIONS, _WHY = "captions", "why"
_logger = logging.getLogger(ACCESS)


def new_caption(scope: Scope) -> CaptionTimes:
    """Returns the empty times of one more caption of this request. The log line includes them."""
    times = CaptionTimes()
    scope["state"].setdefault(_CAPTIONS, []).append(times)
    return times


def captions_of(scope: Scope) -> list[CaptionTimes]:
    """Returns the times of all captions of this request so far."""
    captions: list[CaptionTimes] = scope["state"].get(_CAPTIONS, [])
    return captions


def note_refusal(scope: Scope, error: ServiceError) -> None:
    """Notes why the request is refused, for its log line: the code of the error, and its option, reason or
    phase."""
    scope["state"][_WHY] = {"code": error.code, **error.extras}


def code_of(scope: Scope) -> str | None:
    """Returns the code of the error that the request was refused with, or None."""
    code: str | None = scope["state"].get(_WHY, {}).get("code")
    return code


def note_state(scope: Scope, state: str, phase: str) -> None:
    """Notes the state and the phase in the reply to a probe, for its log line."""
    scope["state"][_WHY] = {"state": state, "phase": phase}


class _Failing:
    """Holds the last 503 of a probe with a log line: the state in the reply, its moment, and the number of probes
    without a line since."""

    def __init__(self, state: object, at: float) -> None:
        self.state = state
        self.at = at
        self.left_out = 0


class RequestLog:
    """Logs one line for each request that captions or fails. Other requests, probes and pages, are logged as DEBUG.

    A probe that gets 503 is logged when the 503s begin, when the state in the reply changes, once a minute, and
    when they end: orchestrators probe every second or two."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failing: dict[str, _Failing] = {}  # by API

    def write(self, scope: Scope, api: str, status: int, began: float, ended: float, *, captions: bool) -> None:
        """Logs the line of a request. `began`, `ended`: moments of `time.monotonic`. `captions`: the API of the
        request captions."""
        level, left_out = self._level(scope, api, status, captions)
        if not _logger.isEnabledFor(level):
            return
        state = scope["state"]
        line: dict[str, object] = {
            "method": scope["method"],
            # The path as sent: a decoded path may contain line breaks.
            "path": scope.get("raw_path", b"").decode("ascii", "replace") or "/",
            "status": status,
            "ms": round((ended - began) * 1000, 1),
        }
        client = scope.get("client")
        if client is not None:
            line["client"] = client[0]
        if _WHY in state:
            line |= state[_WHY]
        if _CAPTIONS in state:
            _add_spent(line, state[_CAPTIONS], ended)
        line["request_id"] = request_id(scope)
        trace = trace_id(scope)
        if trace is not None:
            line["trace_id"] = trace
        if left_out is not None:
            line["left_out"] = left_out
        # `Logger.log` would search the stack for the caller, which costs as much time as all lines above.
        fields = {"fields": line}
        _logger.handle(_logger.makeRecord(ACCESS, level, "", 0, "request", (), None, extra=fields))

    def _level(self, scope: Scope, api: str, status: int, captions: bool) -> tuple[int, int | None]:
        """Returns the level of the line, and the number of lines left out before it, or None."""
        if scope["method"] in ("GET", "HEAD"):
            if status == 503:
                return self._level_of_failing(api, scope["state"].get(_WHY, {}).get("state"))
            if status < 400 and api in self._failing:
                return logging.INFO, self._failing.pop(api).left_out
        return logging.INFO if captions or status >= 400 else logging.DEBUG, None

    def _level_of_failing(self, api: str, state: object) -> tuple[int, int | None]:
        now, before = self._clock(), self._failing.get(api)
        if before is not None and before.state == state and now - before.at < SECONDS_BETWEEN_PROBES:
            before.left_out += 1
            return logging.DEBUG, None
        self._failing[api] = _Failing(state, now)
        return logging.INFO, None if before is None else before.left_out


def _add_spent(line: dict[str, object], captions: list[CaptionTimes], ended: float) -> None:
    """Adds the tokens of all captions and the longest wait of one to a line. The wait is unknown for an image that
    could not be decoded, unless the request was given up while the image waited."""
    known = line.get("code") in REJECTED
    tokens, waited = 0, -1.0
    for each in captions:
        tokens += each.tokens
        if each.image_began or known:
            waited = max(waited, each.waited_s(ended))
    line["tokens"] = tokens
    if waited >= 0:
        line["queue_ms"] = round(waited * 1000, 1)
