"""Logs each request that is refused before it reaches the application.

A client can open any number of connections beyond the limit, so at most one of their refusals is logged a second.
"""

import logging
import time
from collections.abc import Callable

from snapcap.service.errors import ServiceError

NO_ROOM = "max_connections"
_SECONDS_BETWEEN = 1.0
_logger = logging.getLogger("snapcap.access")


class RefusalLog:
    """Logs the refusals of one server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = float("-inf")
        self._left_out = 0

    def write(self, error: ServiceError, reason: str, client: tuple[str, int] | None) -> None:
        """Logs a refusal. `reason` is one of `telemetry.reasons.CLOSED`, `client` the address and port of the
        client. The field `left_out` counts the refusals that were not logged since the last line."""
        address = client[0] if client else ""
        fields: dict[str, object] = {
            "status": error.status,
            "client": address,
            "code": error.code,
            "reason": reason,
        }
        if reason == NO_ROOM:
            now = self._clock()
            if now - self._last < _SECONDS_BETWEEN:
                self._left_out += 1
                return
            if self._left_out:
                fields["left_out"] = self._left_out
            self._last, self._left_out = now, 0
        _logger.info("request refused", extra={"fields": fields})
