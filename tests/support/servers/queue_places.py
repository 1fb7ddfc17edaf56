"""Asks for captions of a server with two places in its queue, and tells who has them."""

import base64
import json
import socket
import threading
from typing import Any

from support.fakes.list_engine import PATIENCE
from support.servers.bounded_server import reply
from support.servers.raw_http import post

from snapcap.models.processing.transform import ImageTransform
from snapcap.service.api.app import Services

PLACES = 2
JSON = {"Content-Type": "application/json"}


def depth(services: Services) -> float | None:
    return services.registry.get_sample_value("snapcap_queue_depth")


class Slow:
    """A transform that decodes once it may."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def decode(self, data: bytes, room: int | None) -> Any:
        self.begun.set()
        self.go_on.wait(PATIENCE)
        return ImageTransform(size=(8, 8)).decode(data, room)


def is_refused_before_its_body(client: socket.socket) -> None:
    """Asserts that a request is refused when half of its body has been sent."""
    client.sendall(post("/v1/caption", b"half of it", {"Content-Length": "20"}))
    status, body = reply(client)
    assert (status, json.loads(body)["code"]) == (429, "queue_full")


def captions(waiting: list[socket.socket]) -> list[str]:
    replies = [reply(client) for client in waiting]
    assert [status for status, _ in replies] == [200] * len(waiting), replies
    return [json.loads(body)["caption"] for _, body in replies]


def chat(image: bytes, **fields: Any) -> bytes:
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": fields.pop("url", url)}}]
    document = {"model": "fake", "messages": [{"role": "user", "content": parts}], **fields}
    return post("/v1/chat/completions", json.dumps(document).encode(), JSON)


def response(image: bytes) -> bytes:
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    content = [{"type": "input_image", "image_url": url}]
    document = {"input": [{"role": "user", "content": content}]}
    return post("/v1/responses", json.dumps(document).encode(), JSON)


def generate(*images: bytes, **fields: Any) -> bytes:
    """A request of Ollama's API."""
    document = {"images": [base64.b64encode(image).decode() for image in images], "stream": False, **fields}
    return post("/api/generate", json.dumps(document).encode(), JSON)


def tensor(*images: bytes) -> bytes:
    data = [base64.b64encode(image).decode() for image in images]
    document = {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [len(data)], "data": data}]}
    return post("/v2/models/fake/infer", json.dumps(document).encode(), JSON)


def form(*images: bytes) -> bytes:
    part = b'--B\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n%s\r\n'
    body = b"".join(part % image for image in images) + b"--B--\r\n"
    return post("/v1/captions", body, {"Content-Type": "multipart/form-data; boundary=B"})
