"""Whatever becomes of a request, its place in the queue is there for another."""

import socket
import struct
from collections.abc import Callable

import pytest
from support.fakes.thread_decoder import attach
from support.servers.bounded_server import BoundedServer, reply, until
from support.servers.queue_places import (
    JSON,
    PLACES,
    Slow,
    captions,
    chat,
    depth,
    form,
    generate,
    is_refused_before_its_body,
    response,
    tensor,
)
from support.servers.raw_http import post

from snapcap.service.errors import EngineFailed
from snapcap.service.images.decode import DecodedImage
from tests.service.conftest import FakeTokenizer

Png = Callable[..., bytes]
ENDS: dict[str, tuple[Callable[[bytes], bytes], int]] = {
    "caption": (lambda image: post("/v1/caption", image), 200),
    "huggingface": (lambda image: post("/", image), 200),
    "chat": (chat, 200),
    "response": (response, 200),
    "generate": (generate, 200),
    "lines of beams": (lambda image: generate(image, stream=True, options={"num_beams": 2}), 422),
    "a model to load": (lambda _: generate(), 200),
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
    "unknown option": (lambda image: post("/v1/caption?beams=1", image), 422),
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
        attach(captioner, engine, slow)
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


def test_a_stream_whose_prompt_cannot_be_written_keeps_no_pixels(tight, image: Png, monkeypatch) -> None:
    """The library of a tokenizer may fail to make text of a prompt's tokens, which a stream needs at its begin."""
    held = 0

    async def decode(_: object) -> DecodedImage:
        nonlocal held
        held += 1
        return DecodedImage(0, "PNG", 1.0, 0.0, (8, 8), give_back)

    def give_back() -> None:
        nonlocal held
        held -= 1

    def fail(_: object) -> None:
        raise RuntimeError("the tokenizer failed to make text of a caption's tokens")

    monkeypatch.setattr(tight.captioner._model.image_decoder, "decode", decode)
    monkeypatch.setattr(FakeTokenizer, "stream", lambda _self, ids: fail(ids))
    with BoundedServer(tight) as server, server.connect() as client:
        client.sendall(chat(image(5), prompt="a", stream=True))
        assert reply(client)[0] == 500
    assert held == 0
