"""Runs uvicorn with an exit that drains before it closes."""

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from snapcap.service.config.settings import HttpSettings
from snapcap.service.http.connections import Connections
from snapcap.service.http.protocol import BoundedHttpProtocol
from snapcap.service.readiness import Readiness

# Seconds after the grace period, for requests that were refused then and have not ended.
_LAST_SECONDS = 5
_logger = logging.getLogger("snapcap.server")


class Server(uvicorn.Server):
    """Drains at SIGTERM or SIGINT. The state is DRAINING at once, so /readyz answers 503. `drain_delay` seconds
    later the listeners close, and running requests have the grace period to finish. A second signal ends the
    process at once."""

    def __init__(
        self,
        app: ASGIApp,
        settings: HttpSettings,
        readiness: Readiness,
        on_live: Callable[[], None],
        connections: Connections,
    ) -> None:
        """`on_live` is called when the event loop accepts connections. Logs are configured elsewhere. The server
        runs with `run(sockets=[listener])`."""
        protocol: Any = partial(BoundedHttpProtocol, connections)
        config = uvicorn.Config(
            app,
            http=protocol,
            loop="auto",
            ws="none",
            lifespan="off",
            workers=1,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=math.ceil(settings.grace_period) + _LAST_SECONDS,
        )
        super().__init__(config)
        self._readiness = readiness
        self._connections = connections
        self._drain_delay = settings.drain_delay
        self._grace_period = settings.grace_period
        self._on_live = on_live
        self._signal: int | None = None
        self._close_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._connections.start()
        self._on_live()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._connections.exit()
        # Requests that still run after the grace period are refused: their clients retry elsewhere. Otherwise
        # uvicorn would cancel the requests and log a traceback for each.
        last = asyncio.get_running_loop().call_later(self._grace_period, self._connections.give_up)
        try:
            await super().shutdown(sockets)
        finally:
            last.cancel()
            self._connections.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The handler only sets a flag, because it may interrupt code that holds the lock of the readiness or of the
        # log.
        if self._signal is not None:
            os._exit(128 + sig)
        self._signal = sig

    def begin_exit(self) -> None:
        """Begins to drain, as a signal does."""
        self._signal = self._signal or 0

    async def on_tick(self, counter: int) -> bool:
        """Begins to drain, or to exit, once a signal was seen. Called by uvicorn ten times a second."""
        if self._signal is not None and self._close_at is None:
            self._readiness.drain()
            self._close_at = time.monotonic() + self._drain_delay
            _logger.info("draining", extra={"fields": {"delay_s": self._drain_delay}})
        if self._close_at is not None and time.monotonic() >= self._close_at:
            self.should_exit = True
        return await super().on_tick(counter)
