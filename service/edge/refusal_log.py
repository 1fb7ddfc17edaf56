"""Writes the log's line of a request that is refused before the application has it.

Of connections that there is no room for there may be as many as a client can open: they have a line a second.
"""

import logging
import time
from collections.abc import Callable

from snapcap.service.errors import ServiceError

NO_ROOM = "max_connections"
_SECONDS_BETWEEN = 1.0
_logger = logging.getLogger("snapcap.access")


class RefusalLog:
    """Of one server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = float("-inf")
        self._left_out = 0

    def write(self, error: ServiceError, reason: str, client: tuple[str, int] | None) -> None:
        """`reason`: one of `telemetry.reasons.CLOSED`. `client`: its address and port. `left_out` in the line: how
        many had none since the one before."""
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
