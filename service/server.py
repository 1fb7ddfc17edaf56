"""uvicorn with an exit that drains before it closes."""

import logging
import math
import os
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from service.config import HttpSettings
from service.readiness import Readiness

_logger = logging.getLogger("snapcap.server")


class Server(uvicorn.Server):
    """SIGTERM or SIGINT: DRAINING at once, so /readyz answers 503; `drain_delay` seconds later the listeners
    close; running requests have the grace period to finish. A second signal ends the process at once."""

    def __init__(
        self,
        config: uvicorn.Config,
        readiness: Readiness,
        drain_delay: float,
        on_live: Callable[[], None],
        exit_now: Callable[[int], object] = os._exit,
    ) -> None:
        """`on_live` is called when the event loop accepts connections."""
        super().__init__(config)
        self._readiness = readiness
        self._drain_delay = drain_delay
        self._on_live = on_live
        self._exit_now = exit_now
        self._signal: int | None = None
        self._close_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_live()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Only a flag: a signal handler may interrupt whoever holds the lock of the readiness or of the log.
        if self._signal is not None:
            self._exit_now(128 + sig)
        self._signal = sig

    def begin_exit(self) -> None:
        """What a signal does, for the process's own reasons."""
        self._signal = self._signal or 0

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if self._signal is not None and self._close_at is None:
            self._readiness.drain()
            self._close_at = time.monotonic() + self._drain_delay
            _logger.info("draining", extra={"fields": {"delay_s": self._drain_delay}})
        if self._close_at is not None and time.monotonic() >= self._close_at:
            self.should_exit = True
        return await super().on_tick(counter)


def make_server(app: ASGIApp, settings: HttpSettings, readiness: Readiness, on_live: Callable[[], None]) -> Server:
    """A server that runs with `run(sockets=[listener])`. Logs are configured elsewhere."""
    config = uvicorn.Config(
        app,
        http="httptools",
        loop="auto",
        ws="none",
        lifespan="off",
        workers=1,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,  # above the 60 s for which common load balancers keep idle connections
        timeout_graceful_shutdown=math.ceil(settings.grace_period),
    )
    return Server(config, readiness, settings.drain_delay, on_live)
