"""Sends one request on a connection of its own, in an event loop, and reads its reply."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from snapcap.benchmarks.harness.http_probe import request_bytes

# Builds a request whose connection is closed after the reply.
lone_request = partial(request_bytes, close=True)


class CutError(ConnectionError):
    """The connection was lost after the reply had begun."""


@dataclass(frozen=True)
class Reply:
    """A reply. ``raw`` holds all of its bytes."""

    status: int
    fields: Mapping[str, str]
    body: bytes
    raw: bytes

    @property
    def retry_after(self) -> float | None:
        """Seconds after which the server asks to retry, or None."""
        text = self.fields.get("retry-after", "")
        return float(text) if text.isdecimal() else None


async def ask(port: int, request: bytes, within: float) -> Reply:
    """Sends a whole request and returns its reply.

    Raises:
        CutError: the connection was lost after the reply had begun.
        OSError: the connection was refused, or lost before.
        TimeoutError: there was no whole reply ``within`` seconds.
    """
    async with asyncio.timeout(within):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            return await _reply(reader)
        finally:
            writer.close()


async def _reply(reader: asyncio.StreamReader) -> Reply:
    begun = False
    try:
        line = await reader.readuntil(b"\r\n")
        begun = True
        rest = await reader.readuntil(b"\r\n\r\n")
        fields = {}
        for each in rest.decode("latin-1").split("\r\n"):
            name, _, value = each.partition(":")
            fields[name.strip().lower()] = value.strip()
        body = await reader.readexactly(int(fields.get("content-length", "0")))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        if begun:
            raise CutError("the reply was cut") from error
        raise ConnectionResetError("no reply") from error
    return Reply(int(line.split()[1]), fields, body, line + rest + body)
