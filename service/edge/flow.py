"""Reads from a connection no faster than its requests are answered.

Each connection of `protocol.py` has one in place of uvicorn's own.
"""

import asyncio
from collections.abc import Sized

from uvicorn.protocols.http.flow_control import FlowControl

# Between two packets that are dropped, in seconds. Left to itself, libuv reads thirty of a connection before
# anything else has its turn.
_DROP_S = 0.002


class Flow(FlowControl):
    """Reads nothing more while requests wait for the reply of the one before them. `waiting`: those requests."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(transport)
        self._waiting = waiting
        self._loop = loop
        self._dropping = False

    def resume_reading(self) -> None:
        if not self._waiting and not self._dropping:
            super().resume_reading()

    def drop(self) -> None:
        """What has come is of no use to anybody: read the next only after a while."""
        if not self._dropping:
            self._dropping = True
            self.pause_reading()
            self._loop.call_later(_DROP_S, self._go_on)

    def _go_on(self) -> None:
        self._dropping = False
        if not self._transport.is_closing():
            self.resume_reading()
