"""Ends the reading of a body whose request has lost its place in the queue."""

import asyncio
from types import TracebackType

from snapcap.service.engine.admission import Permit


class Receiving:
    """Around what reads the body of a request: raises QueueFull once the place of its permit has gone to another
    request (`Admission`), in place of what is awaited then."""

    def __init__(self, permit: Permit) -> None:
        self._permit = permit
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        await self._timeout.__aenter__()
        self._permit.receiving(lambda: self._timeout.reschedule(loop.time()))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        finally:
            self._permit.received()
