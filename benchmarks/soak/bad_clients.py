"""Sends garbage, odd requests and half requests straight to the servers.

A reply of status 500 is a failure of the server, because these requests may only be refused.
"""

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Sequence

from snapcap.benchmarks.harness.common import samples
from snapcap.benchmarks.soak.asking import ask, lone_request
from snapcap.benchmarks.soak.replica import Replica

_HEAD = b"POST /v1/caption HTTP/1.1\r\nHost: a\r\n"
_JSON = "application/json"


def bad_requests() -> list[bytes]:
    """Returns whole requests, each of which must be answered by 4xx, or not at all."""
    image = next(iter(samples().values()))[0]
    bodies = [
        *(("/v1/caption", data, "image/png") for data in (b"", b"\0" * 5_000, image[:100], image[:-40], b"GIF89a")),
        *(("/v1/caption", data, _JSON) for data in (b"{", b"[" * 5_000, b"\xff\xfe", b'{"image": 1e999}')),
        ("/v1/caption?num_beams=-1", image, "image/png"),
        ("/v1/caption?seed=%ff", image, "image/png"),
        ("/v1/caption", b"--b\r\n", "multipart/form-data; boundary=b"),
        ("/v1/captions", b"--b--\r\n" * 1_000, "multipart/form-data; boundary=b"),
        ("/v1/chat/completions", json.dumps({"model": "demo", "messages": "a" * 10_000}).encode(), _JSON),
        ("/v2/models/other/infer", b"{}", _JSON),
        ("/" + "a" * 5_000, b"", _JSON),
    ]
    raw = [
        _HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        _HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        _HEAD + b"Content-Length: -1\r\n\r\n",
        b"\x16\x03\x01" + b"\0" * 300 + b"\r\n\r\n",
    ]
    return [*(lone_request(*body) for body in bodies), *raw]


class BadClients:
    """Clients that send bad requests. ``answered`` counts the replies by status; 0 is no reply."""

    def __init__(self, replicas: Sequence[Replica], chooser: random.Random, pause_s: float = 0.1) -> None:
        self.answered: Counter[int] = Counter()
        self._replicas = replicas
        self._chooser = chooser
        self._pause_s = pause_s
        self._requests = bad_requests()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._client()) for _ in range(2)]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _client(self) -> None:
        while True:
            port, request = self._chooser.choice(self._replicas).port, self._chooser.choice(self._requests)
            if self._chooser.random() < 0.3:
                await leave(port, request[: self._chooser.randrange(1, len(request))])
            else:
                self.answered[await status_of(port, request)] += 1
            await asyncio.sleep(self._pause_s * self._chooser.random() * 2)


async def status_of(port: int, request: bytes, within: float = 30.0) -> int:
    """Returns the status of a reply, or 0 if there is none."""
    try:
        return (await ask(port, request, within)).status
    except (OSError, TimeoutError, ValueError, asyncio.LimitOverrunError):
        return 0


async def leave(port: int, beginning: bytes, stay_s: float = 0.0) -> None:
    """Sends the beginning of a request, and resets the connection after a while."""
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        client = writer.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.write(beginning)
        await asyncio.sleep(stay_s)
        writer.close()
