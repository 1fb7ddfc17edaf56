"""The queue of a server as its clients meet it: `--queue-size` requests wait, wherever they are; one more is
refused before its body is read; and whatever becomes of a request, its place is there for another."""

import asyncio
import base64
import json
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.fakes.list_engine import PATIENCE, Served
from support.servers.bounded_server import BoundedServer, reply, until
from support.servers.raw_http import post

from snapcap.models.processing.transform import ImageTransform
from snapcap.service.api.app import Services
from snapcap.service.api.openai.image_fetcher import ImageFetcher
from snapcap.service.engine.remote.client import EngineChannelFull
from snapcap.service.errors import EngineFailed
from snapcap.service.images.room import ImageMemoryFull

Png = Callable[..., bytes]
PLACES = 2
JSON = {"Content-Type": "application/json"}


def depth(services: Services) -> float | None:
    return services.registry.get_sample_value("snapcap_queue_depth")


def rejected(services: Services, reason: str) -> float | None:
    return services.registry.get_sample_value("snapcap_requests_rejected_total", {"reason": reason})


class Slow:
    """A transform that decodes once it may."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def decode(self, data: bytes, room: int | None) -> Any:
        self.begun.set()
        self.go_on.wait(PATIENCE)
        return ImageTransform(size=(8, 8)).decode(data, room)


@pytest.fixture
def tight(make_services, serve_with) -> Services:
    """Ready to caption, with two places."""
    return serve_with(make_services(queue_size=PLACES))


@pytest.fixture
def server(tight: Services) -> Iterator[BoundedServer]:
    with BoundedServer(tight) as server:
        yield server


@pytest.fixture
def clients(server: BoundedServer) -> Iterator[Callable[[], socket.socket]]:
    with ExitStack() as exits:
        yield lambda: exits.enter_context(server.connect())


def is_refused_before_its_body(client: socket.socket) -> None:
    """It has sent half of a body, and gets its answer."""
    client.sendall(post("/v1/caption", b"half of it", {"Content-Length": "20"}))
    status, body = reply(client)
    assert (status, json.loads(body)["code"]) == (429, "queue_full")


def captions(waiting: list[socket.socket]) -> list[str]:
    replies = [reply(client) for client in waiting]
    assert [status for status, _ in replies] == [200] * len(waiting), replies
    return [json.loads(body)["caption"] for _, body in replies]


def test_bodies_on_their_way_keep_nobody_out(server: BoundedServer, clients, engine, image: Png) -> None:
    """However many: a place is for an image that is here. One that comes to a full queue is refused after all."""
    request = post("/v1/caption", image(5))
    coming = [clients() for _ in range(PLACES * 10)]
    for client in coming:
        client.sendall(request[:-1])
    captioned = clients()
    captioned.sendall(request)
    assert captions([captioned]) == ["5 7"]
    engine.gate.clear()
    for client in coming[:PLACES]:
        client.sendall(request[-1:])
    until(lambda: depth(server.services) == PLACES)
    is_refused_before_its_body(clients())
    coming[-1].sendall(request[-1:])
    status, body = reply(coming[-1])
    assert (status, json.loads(body)["code"]) == (429, "queue_full")
    engine.gate.set()
    assert captions(coming[:PLACES]) == ["5 7"] * PLACES
    assert depth(server.services) == 0


def test_images_that_threads_decode(server: BoundedServer, clients, engine, image: Png) -> None:
    slow, captioner = Slow(), server.services.captioner
    captioner.attach(engine, slow, captioner._model.tokenizer, "fake")  # type: ignore[arg-type, union-attr]
    waiting = [clients() for _ in range(PLACES)]
    for client in waiting:
        client.sendall(post("/v1/caption", image(5)))
    until(lambda: depth(server.services) == PLACES)
    assert slow.begun.wait(PATIENCE)
    is_refused_before_its_body(clients())
    slow.go_on.set()
    assert captions(waiting) == ["5 7"] * PLACES
    assert depth(server.services) == 0


def test_the_engine_of_this_process(server: BoundedServer, clients, image: Png) -> None:
    """What runs on the device does not wait: its place is another's."""
    served, captioner, steps = Served(), server.services.captioner, threading.Event()
    runner: Any = served.runner
    encode = runner.encode  # takes numbers for images: here the value of their pixels
    runner.encode = lambda bucket, images, first: encode(bucket, [int(each[0, 0, 0]) for each in images], first)
    runner.before_step = lambda: steps.wait(PATIENCE)
    transform: Any = ImageTransform(size=(8, 8))
    captioner.attach(served.engine, transform, captioner._model.tokenizer, "fake")  # type: ignore[union-attr]
    request = post("/v1/caption?max_new_tokens=2", image(5))
    running, waiting = clients(), [clients() for _ in range(PLACES)]
    running.sendall(request)
    until(lambda: len(served.scheduler.running) == 1 and depth(server.services) == 0)
    for client in waiting:
        client.sendall(request)
    until(lambda: served.scheduler.depth == depth(server.services) == PLACES)
    is_refused_before_its_body(clients())
    steps.set()
    assert captions([running, *waiting]) == ["500 501"] * (1 + PLACES)
    assert depth(server.services) == 0
    served.engine.stop()
    served.thread.join(PATIENCE)


def test_who_is_refused_finds_which_limit_it_was(
    server: BoundedServer, clients, engine, image: Png, caplog: pytest.LogCaptureFixture
) -> None:
    """In the reply, in the log's line and in the metric."""
    services = server.services
    client = clients()
    for refusal, code in (
        (EngineChannelFull(), "engine_channel_full"),
        (ImageMemoryFull(), "image_memory_full"),
    ):
        engine.refuse = refusal
        with caplog.at_level(logging.INFO, "snapcap.access"):
            caplog.clear()
            client.sendall(post("/v1/caption", image(5)))
            status, body = reply(client)
            until(lambda: bool(caplog.records))
        assert (status, json.loads(body)["code"]) == (429, code)
        assert json.loads(body)["type"] == f"urn:snapcap:problem:{code}"
        (record,) = caplog.records
        assert record.fields["code"] == code  # type: ignore[attr-defined]
        assert rejected(services, code) == 1
    assert rejected(services, "queue_full") == 0
    engine.refuse = None
    caplog.clear()
    with caplog.at_level(logging.INFO, "snapcap.access"):
        client.sendall(post("/v1/caption", image(5)))
        assert reply(client)[0] == 200
        until(lambda: bool(caplog.records))
    assert "code" not in caplog.records[0].fields  # type: ignore[attr-defined]


# --- the place comes back ---


def chat(image: bytes, **fields: Any) -> bytes:
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": fields.pop("url", url)}}]
    document = {"model": "fake", "messages": [{"role": "user", "content": parts}], **fields}
    return post("/v1/chat/completions", json.dumps(document).encode(), JSON)


def tensor(*images: bytes) -> bytes:
    data = [base64.b64encode(image).decode() for image in images]
    document = {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [len(data)], "data": data}]}
    return post("/v2/models/fake/infer", json.dumps(document).encode(), JSON)


def form(*images: bytes) -> bytes:
    part = b'--B\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n%s\r\n'
    body = b"".join(part % image for image in images) + b"--B--\r\n"
    return post("/v1/captions", body, {"Content-Type": "multipart/form-data; boundary=B"})


ENDS: dict[str, tuple[Callable[[bytes], bytes], int]] = {
    "caption": (lambda image: post("/v1/caption", image), 200),
    "huggingface": (lambda image: post("/", image), 200),
    "chat": (chat, 200),
    "several": (lambda image: form(image, image), 200),
    "several, one bad": (lambda image: form(image, b"bad"), 200),
    "tensor": (lambda image: tensor(image, image), 200),
    "tensor, one bad": (lambda image: tensor(b"bad", image), 422),
    "more images than places": (lambda image: form(image, image, image), 200),
    "too many in a tensor": (lambda image: tensor(image, image, image), 422),
    "empty body": (lambda _: post("/v1/caption"), 400),
    "bad body": (lambda _: post("/v1/caption", b"{", JSON), 400),
    "bad form": (lambda _: post("/v1/captions", b"x", {"Content-Type": "multipart/form-data; boundary=B"}), 400),
    "media type": (lambda _: post("/v1/caption", b"x", {"Content-Type": "text/plain"}), 415),
    "too large": (lambda _: post("/v1/caption", b"", {"Content-Length": str(2 << 20)}), 413),
    "unknown option": (lambda image: post("/v1/caption?nothing=1", image), 422),
    "unreadable image": (lambda _: post("/v1/caption", b"not an image"), 422),
    "prompt too long": (lambda image: post(f"/v1/caption?prompt={'a+' * 90}", image), 422),
    "another model": (lambda image: chat(image, model="other"), 404),
    "an image URL": (lambda image: chat(image, url="https://example.com/a.png"), 422),
    "deadline": (lambda image: post("/v1/caption?timeout=0.000001", image), 504),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_place_of_a_request_comes_back(server: BoundedServer, clients, image: Png, end: str) -> None:
    request, expected = ENDS[end]
    for _ in range(PLACES + 1):
        client = clients()
        client.sendall(request(image(5)))
        status, body = reply(client)
        assert status == expected, body
        assert depth(server.services) == 0
        client.close()


@pytest.mark.parametrize("failure", [EngineFailed(), RuntimeError("broken")], ids=["known", "unknown"])
@pytest.mark.parametrize(
    "request_of", [lambda image: post("/v1/caption", image), chat, tensor], ids=["caption", "chat", "tensor"]
)
def test_the_place_comes_back_when_the_engine_fails(
    server: BoundedServer, clients, engine, image: Png, failure: Exception, request_of: Callable[[bytes], bytes]
) -> None:
    engine.fail = failure
    client = clients()
    for _ in range(PLACES + 1):
        client.sendall(request_of(image(5)))
        assert reply(client)[0] == 500
        assert depth(server.services) == 0


@pytest.mark.parametrize("politely", [True, False], ids=["closes", "resets"])
@pytest.mark.parametrize("during", ["decode", "queue", "stream", "several", "tensor"])
def test_the_place_comes_back_when_the_client_leaves(
    server: BoundedServer, clients, engine, image: Png, during: str, politely: bool
) -> None:
    slow, captioner = Slow(), server.services.captioner
    if during == "decode":
        captioner.attach(engine, slow, captioner._model.tokenizer, "fake")  # type: ignore[arg-type, union-attr]
    else:
        engine.gate.clear()
    request = {
        "stream": chat(image(5), stream=True),
        "several": form(image(5), image(6)),
        "tensor": tensor(image(5), image(6)),
    }.get(during, post("/v1/caption", image(5)))
    count = 1 if during in ("several", "tensor") else PLACES
    leaving = [clients() for _ in range(count)]
    for client in leaving:
        client.sendall(request)
    until(lambda: depth(server.services) == PLACES)
    if during != "decode":
        until(lambda: len(engine.requests) == PLACES)
    is_refused_before_its_body(clients())
    for client in leaving:
        if not politely:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    until(lambda: depth(server.services) == 0)
    slow.go_on.set()
    engine.gate.set()
    again = clients()
    again.sendall(post("/v1/caption", image(7)))
    assert captions([again]) == ["7 7"]


def test_an_image_fetched_from_a_url_has_its_place_once_it_is_here(
    server: BoundedServer, clients, image: Png, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFetcher, "fetch", lambda *_: asyncio.sleep(PATIENCE))
    fetching = clients()
    fetching.sendall(chat(image(5), url="https://example.com/a.png"))
    until(lambda: server.services.registry.get_sample_value("snapcap_requests_in_flight") == 1)
    assert depth(server.services) == 0


def test_images_without_a_place(server: BoundedServer, clients, engine, image: Png) -> None:
    """Of a tensor all have theirs or none has; of a form each has its own, and its own answer."""
    engine.gate.clear()
    waiting, tensors, forms = clients(), clients(), clients()
    waiting.sendall(post("/v1/caption", image(5)))
    until(lambda: len(engine.requests) == 1)
    tensors.sendall(tensor(image(1), image(2)))
    assert reply(tensors)[0] == 429
    assert depth(server.services) == len(engine.requests) == 1, "none of them has begun"
    forms.sendall(form(image(1), image(2)))
    until(lambda: len(engine.requests) == 2)
    engine.gate.set()
    status, body = reply(forms)
    first, second = json.loads(body)["captions"]
    assert (status, first["caption"], second["code"]) == (200, "1 7", "queue_full")
    assert captions([waiting]) == ["5 7"]


def test_who_is_not_ready_says_so_before_the_queue_is_asked(make_services, new_client, image: Png) -> None:
    services = make_services(queue_size=1)
    services.captioner._admission.admit().take()
    assert new_client(services).post("/v1/caption", content=image()).status_code == 503
