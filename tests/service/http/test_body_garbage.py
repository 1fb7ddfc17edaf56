"""A body's bytes are gone when its account says so, and not when the garbage collector has its next turn."""

import base64
import gc
import json
import tracemalloc
from collections.abc import Iterator

import pytest
from support.servers.bounded_server import BoundedServer, reply, until

from snapcap.service.http.bodies import BodyLimits
from snapcap.service.memory import BodyBudget

SIZE = 700_000
TIMES = 10
DATA = b"no image" * (SIZE // 8)
TEXT = base64.b64encode(DATA).decode()
BOUNDARY = "multipart/form-data; boundary=B"


def form(data: bytes) -> bytes:
    return b'--B\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + data + b"\r\n--B--"


def post(path: str, body: bytes, kind: str, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n\r\n".encode() + body
    )


def chat(url: str) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    return json.dumps({"model": "fake", "messages": [{"role": "user", "content": parts}]}).encode()


def response(url: str) -> bytes:
    parts = [{"type": "input_image", "image_url": url}]
    return json.dumps({"input": [{"role": "user", "content": parts}]}).encode()


def infer(text: str) -> bytes:
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [text]}
    return json.dumps({"inputs": [tensor]}).encode()


JSON = "application/json"
REQUESTS = {
    "raw": (post("/v1/caption", DATA, "image/png"), 422),
    "form": (post("/v1/caption", form(DATA), BOUNDARY), 422),
    "forms": (post("/v1/captions", form(DATA), BOUNDARY), 200),
    "form_without_end": (post("/v1/caption", form(DATA)[:-9], BOUNDARY), 400),
    "form_of_unknown": (post("/v1/caption", form(DATA).replace(b"image", b"other"), BOUNDARY), 422),
    "json": (post("/v1/caption", json.dumps({"image": TEXT}).encode(), JSON), 422),
    "json_no_base64": (post("/v1/caption", json.dumps({"image": TEXT + "!"}).encode(), JSON), 422),
    "json_unknown": (post("/v1/caption", json.dumps({"image": TEXT, "a": 1}).encode(), JSON), 422),
    "no_json": (post("/v1/caption", b"{" + TEXT.encode(), JSON), 413),
    "huggingface": (post("/", json.dumps({"inputs": TEXT}).encode(), JSON), 422),
    "chat": (post("/v1/chat/completions", chat("data:image/png;base64," + TEXT), JSON), 422),
    "response": (post("/v1/responses", response("data:image/png;base64," + TEXT), JSON), 422),
    "generate": (post("/api/generate", json.dumps({"images": [TEXT]}).encode(), JSON), 422),
    "infer": (post("/v2/models/fake/infer", infer(TEXT), JSON), 422),
    "nowhere": (post("/v1/nowhere", DATA, "image/png"), 404),
}


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


def grown(base: int) -> int:
    """Bytes since then."""
    return tracemalloc.get_traced_memory()[0] - base


@pytest.mark.parametrize("name", REQUESTS)
def test_nothing_of_a_body_waits_for_the_garbage_collector(services, without_collector, name: str) -> None:
    request, status = REQUESTS[name]
    budget = BodyBudget()
    with BoundedServer(services, bodies=BodyLimits(1 << 20, 30.0, budget=budget)) as server:
        base = 0
        for _ in range(TIMES):
            with server.connect() as client:
                client.sendall(request)
                assert reply(client)[0] == status
            until(lambda: budget.held == 0 and not server.connections.all)
            base = base or grown(0)
        until(lambda: grown(base) < 2 * SIZE)


def test_nor_of_one_whose_client_has_left(services, engine, image, without_collector) -> None:
    engine.gate.clear()
    budget, data = BodyBudget(), image(5) + DATA
    whole, half = post("/v1/caption", data, "image/png"), post("/v1/caption", DATA, "image/png", SIZE + 9)
    with BoundedServer(services, bodies=BodyLimits(1 << 20, 30.0, budget=budget)) as server:
        base = 0
        for _ in range(TIMES):
            for request in (whole, half):
                with server.connect() as client:
                    client.sendall(request)
                    until(lambda: budget.held >= SIZE)
                until(lambda: budget.held == 0 and not server.connections.all)
            base = base or grown(0)
        until(lambda: grown(base) < 2 * SIZE)
