"""Sends good and bad requests to the servers of a soak, and counts the outcomes of the good ones."""

import asyncio
import base64
import contextlib
import itertools
import json
import operator
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from snapcap.benchmarks.harness.server import Reply, request_bytes
from snapcap.benchmarks.harness.workload import samples
from snapcap.benchmarks.soak.servers import Replica, ask

PATIENCE_S = 180.0
TIMEOUT_S = 90.0
THOUGHT_S = 0.05  # average time between a caption and a good client's next request
BAD_TIMEOUT_S = 30.0
PAUSE_S = 0.1  # average time between two requests of a bad client
JSON = "application/json"
_PASSING = (0, 408, 429, 502, 503, 504)
_HEAD = b"POST /v1/caption HTTP/1.1\r\nHost: a\r\n"


def multipart(image: bytes) -> tuple[bytes, str]:
    """Returns the body and content type of a form with the image as a file."""
    head = '--b\r\nContent-Disposition: form-data; name="image"; filename="photo.png"\r\n\r\n'
    return head.encode() + image + b"\r\n--b--\r\n", "multipart/form-data; boundary=b"


@dataclass(frozen=True)
class Request:
    """A request and its known caption. ``place``: the keys that lead to the caption in the reply's document."""

    api: str
    data: bytes
    caption: str
    place: tuple[str | int, ...]


@dataclass
class Tally:
    """The outcomes of all requests of good clients. ``problems`` describes the first lost or wrong ones."""

    requests: int = 0
    retried: int = 0
    lost: int = 0
    wrong: int = 0
    slowest: float = 0.0
    problems: list[str] = field(default_factory=list)

    def problem(self, request: Request, text: str) -> None:
        if len(self.problems) < 100:
            self.problems.append(f"{time.strftime('%H:%M:%S')} {request.api}: {text}")


def requests(models: Sequence[str] = ("demo",)) -> list[Request]:
    """Returns requests of every sample picture through every API to every model. All of them are the demo model; a
    request without a name is the first one's."""
    found = []
    for (image, caption), model in itertools.product(samples().values(), models):
        named = "" if model == models[0] else f"?model={model}"
        text = base64.b64encode(image).decode()
        chat = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}]
        turns = [{"role": "user", "content": chat}]
        tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [text]}
        documents: tuple[tuple[str, Any, tuple[str | int, ...]], ...] = (
            (f"/v1/caption{named}", {"image": text}, ("caption",)),
            (f"/models/{model}" if named else "/", {"inputs": text}, (0, "generated_text")),
            ("/v1/chat/completions", {"model": model, "messages": turns}, ("choices", 0, "message", "content")),
            ("/v1/responses", {"model": model, "input": turns}, ("output", 0, "content", 0, "text")),
            ("/api/generate", {"model": model, "images": [text], "stream": False}, ("response",)),
            (f"/v2/models/{model}/infer", {"inputs": [tensor]}, ("outputs", 0, "data", 0)),
        )
        for path, document, place in documents:
            found.append(Request(path, request_bytes(path, json.dumps(document).encode(), JSON), caption, place))
        bodies = [request_bytes(f"/v1/caption{named}", *body) for body in ((image, "image/png"), multipart(image))]
        found += [Request("/v1/caption", body, caption, ("caption",)) for body in bodies]
    return found


class GoodClients:
    """Clients that retry as the API tells them to, each at the other server first."""

    def __init__(
        self, replicas: Sequence[Replica], chooser: random.Random, models: Sequence[str] = ("demo",)
    ) -> None:
        self.tally = Tally()
        self._replicas = replicas
        self._chooser = chooser
        self._requests = requests(models)

    async def run(self, over: asyncio.Event) -> None:
        """Runs one client, which waits a moment after a caption and then sends the next request."""
        while not over.is_set():
            await self._caption(self._chooser.choice(self._requests))
            await asyncio.sleep(THOUGHT_S * self._chooser.random() * 2)

    async def _caption(self, request: Request) -> None:
        tally, began, last = self.tally, time.monotonic(), ""
        tally.requests += 1
        turns = itertools.cycle(self._chooser.sample(self._replicas, len(self._replicas)))
        for attempt, replica in enumerate(turns, 1):
            if time.monotonic() - began > PATIENCE_S:
                break
            reply = await ask(replica.port, request.data, TIMEOUT_S)
            if reply.status not in _PASSING:
                tally.slowest = max(tally.slowest, time.monotonic() - began)
                self._judge(request, reply)
                return
            last = f"{reply.status} {reply.body[:200]!r}"
            tally.retried += 1
            if attempt % len(self._replicas) == 0:
                after = reply.fields.get("retry-after", "")
                await asyncio.sleep(float(after) if after.isdecimal() else 1.0)
        tally.lost += 1
        tally.problem(request, f"gave up after {PATIENCE_S:.0f} s: {last}")

    def _judge(self, request: Request, reply: Reply) -> None:
        if reply.status != 200:
            self.tally.lost += 1
            self.tally.problem(request, f"{reply.status} {reply.body[:300]!r}")
        elif (found := caption_of(request, reply)) != request.caption:
            self.tally.wrong += 1
            self.tally.problem(request, f"{found!r} instead of {request.caption!r}")


async def captions_rightly(port: int, request: Request) -> bool:
    """Returns whether a server answers with the right caption in time."""
    reply = await ask(port, request.data, 5.0)
    return reply.status == 200 and caption_of(request, reply) == request.caption


def caption_of(request: Request, reply: Reply) -> str:
    """Returns the caption in a reply, or the reply's body if it has none."""
    try:
        return str(reduce(operator.getitem, request.place, json.loads(reply.body)))
    except (ValueError, KeyError, IndexError, TypeError):
        return repr(reply.body[:300])


def bad_requests() -> list[bytes]:
    """Returns whole requests, each of which must be answered by 4xx, or not at all."""
    image = next(iter(samples().values()))[0]
    bodies = [
        *(("/v1/caption", data, "image/png") for data in (b"", b"\0" * 5_000, image[:100], image[:-40], b"GIF89a")),
        *(("/v1/caption", data, JSON) for data in (b"{", b"[" * 5_000, b"\xff\xfe", b'{"image": 1e999}')),
        ("/v1/caption?num_beams=-1", image, "image/png"),
        ("/v1/caption?seed=%ff", image, "image/png"),
        ("/v1/caption", b"--b\r\n", "multipart/form-data; boundary=b"),
        ("/v1/captions", b"--b--\r\n" * 1_000, "multipart/form-data; boundary=b"),
        ("/v1/chat/completions", json.dumps({"model": "demo", "messages": "a" * 10_000}).encode(), JSON),
        ("/v2/models/other/infer", b"{}", JSON),
        ("/" + "a" * 5_000, b"", JSON),
    ]
    raw = [
        _HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        _HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        _HEAD + b"Content-Length: -1\r\n\r\n",
        b"\x16\x03\x01" + b"\0" * 300 + b"\r\n\r\n",
    ]
    return [*(request_bytes(*body) for body in bodies), *raw]


class BadClients:
    """Clients that send bad requests. ``answered`` counts the replies by status; 0 is no reply."""

    def __init__(self, replicas: Sequence[Replica], chooser: random.Random) -> None:
        self.answered: Counter[int] = Counter()
        self._replicas = replicas
        self._chooser = chooser
        self._requests = bad_requests()

    async def run(self, over: asyncio.Event) -> None:
        """Runs one client."""
        while not over.is_set():
            port, request = self._chooser.choice(self._replicas).port, self._chooser.choice(self._requests)
            if self._chooser.random() < 0.3:
                await leave(port, request[: self._chooser.randrange(1, len(request))])
            else:
                self.answered[(await ask(port, request, BAD_TIMEOUT_S)).status] += 1
            await asyncio.sleep(PAUSE_S * self._chooser.random() * 2)


async def leave(port: int, beginning: bytes, stay_s: float = 0.0) -> None:
    """Sends the beginning of a request, and resets the connection after a while."""
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        client = writer.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.write(beginning)
        await asyncio.sleep(stay_s)
        writer.close()
