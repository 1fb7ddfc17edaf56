"""Proxies TCP to a store, and passes on, withholds, delays, cuts or corrupts the store's replies."""

import asyncio
import contextlib
import random
from enum import Enum
from typing import Any

DELAY_S = 0.5  # for each piece


class Lie(Enum):
    """A treatment of the store's bytes."""

    NONE = "passes on"
    SILENCE = "black hole"
    DELAY = "slow"
    CUT = "truncates"
    CORRUPTION = "corrupts"


class LyingProxy:
    """A proxy. ``lie`` may be changed at any time, and applies to each later piece."""

    def __init__(self, store_port: int, chooser: random.Random) -> None:
        self.lie = Lie.NONE
        self.port = 0
        self._store_port = store_port
        self._chooser = chooser
        self._server: asyncio.Server | None = None
        # Keeps references, because otherwise a task that waits for a silent store could be collected.
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError):
            store_reader, store_writer = await asyncio.open_connection("127.0.0.1", self._store_port)
            asks = asyncio.create_task(_copy(reader, store_writer))
            with contextlib.suppress(OSError):
                await self._answer(store_reader, writer)
            asks.cancel()
            store_writer.close()
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            while self.lie is Lie.SILENCE:  # noqa: ASYNC110 - until somebody changes it
                await asyncio.sleep(0.1)
            if self.lie is Lie.DELAY:
                await asyncio.sleep(DELAY_S)
            elif self.lie is Lie.CUT and len(piece) > 1000:
                writer.write(piece[: len(piece) // 2])
                await writer.drain()
                return
            elif self.lie is Lie.CORRUPTION and len(piece) > 1000:
                piece = self._corrupted(piece)
            writer.write(piece)
            await writer.drain()

    def _corrupted(self, piece: bytes) -> bytes:
        """Returns the piece with one bit of its second half flipped, so the head of a reply stays intact."""
        changed = bytearray(piece)
        changed[self._chooser.randrange(len(piece) // 2, len(piece))] ^= 1 << self._chooser.randrange(8)
        return bytes(changed)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()
