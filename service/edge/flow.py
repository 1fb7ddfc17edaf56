"""Reads from a connection no faster than its requests are answered.

Each connection of `protocol.py` has a `Flow` in place of uvicorn's own flow control.
"""

import asyncio
from collections.abc import Sized

from uvicorn.protocols.http.flow_control import FlowControl

# Seconds between two packets that are dropped. Without a pause, libuv reads thirty packets of a connection before
# it does anything else.
_DROP_S = 0.002


class Flow(FlowControl):
    """Pauses reading while a request of the connection waits for the reply to the request before it. `waiting`
    holds these requests."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(transport)
        self._waiting = waiting
        self._loop = loop
        self._dropping = False

    def resume_reading(self) -> None:
        if not self._waiting and not self._dropping:
            super().resume_reading()

    def drop(self) -> None:
        """Pauses reading for a moment, because the bytes that arrived were dropped."""
        if not self._dropping:
            self._dropping = True
            self.pause_reading()
            self._loop.call_later(_DROP_S, self._go_on)

    def _go_on(self) -> None:
        self._dropping = False
        if not self._transport.is_closing():
            self.resume_reading()
