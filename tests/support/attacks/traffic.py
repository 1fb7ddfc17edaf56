"""Sends requests of every kind that a server's metrics tell apart."""

import io
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image
from support.servers.server_process import ServerProcess

# Options for `refusals`: limits that a test can reach.
TIGHT = ("--queue-size", "2", "--max-body-bytes", "1MiB", "--max-body-memory", "1MiB", "--body-timeout", "5")
_FORMATS = ("PNG", "JPEG", "WEBP")


def captions(server: ServerProcess, picture: Path) -> None:
    """Requests a caption in each image format, through each API that takes an image as it is, and some other
    paths."""
    for form in _FORMATS:
        file = io.BytesIO()
        Image.open(picture).convert("RGB").save(file, form)
        assert server.call("/v1/caption", file.getvalue())[0] == 200
    # Three rows fit no bucket but one with padding, whichever requests run beside them.
    assert server.call("/v1/caption?num_beams=3", picture.read_bytes())[0] == 200
    assert server.call("/", picture.read_bytes())[0] == 200
    assert server.call("/nothing/here")[0] == 404
    assert server.call("/readyz")[0] == 200


def refusals(server: ServerProcess, picture: Path) -> None:
    """Sends a request for each way to be refused or given up, to a ready server with the limits of `TIGHT`."""
    image = picture.read_bytes()
    assert server.call("/v1/caption", b"not an image")[0] == 422
    assert server.call("/v1/caption?timeout=0.0001", image)[0] == 504
    assert _half_sent(server, announced=2 << 20).startswith(b"HTTP/1.1 413 ")
    assert _half_sent(server, announced=1000).startswith(b"HTTP/1.1 408 ")
    _leave(server)
    with _request(server, announced=1 << 20, sent=900_000):
        server.wait_for(lambda: server.metrics()["snapcap_body_memory_bytes"] == 900_000)
        with _request(server, announced=1 << 20, sent=900_000) as other:
            assert other.recv(4096).startswith(b"HTTP/1.1 429 ")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"not HTTP\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 400 ")
    assert any(429 in _burst(server, image) for _ in range(20))


def _burst(server: ServerProcess, image: bytes) -> set[int]:
    with ThreadPoolExecutor(24) as pool:
        return set(pool.map(lambda _: server.call("/v1/caption", image)[0], range(24)))


def _request(server: ServerProcess, announced: int, sent: int = 4) -> socket.socket:
    """A connection that has sent the head of a request and so many bytes of its body."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = f"POST /v1/caption HTTP/1.1\r\nHost: a\r\nContent-Length: {announced}\r\n\r\n"
    client.sendall(head.encode() + bytes(sent))
    return client


def _half_sent(server: ServerProcess, announced: int) -> bytes:
    """The reply to a body that stops coming."""
    with _request(server, announced) as client:
        return client.recv(4096)


def _leave(server: ServerProcess) -> None:
    """A client that closes the connection before it has sent everything."""
    refused = 'snapcap_requests_rejected_total{reason="client_disconnected"}'
    with _request(server, announced=1000):
        server.wait_for(lambda: server.metrics()["snapcap_requests_in_flight"] == 1)
    server.wait_for(lambda: server.metrics()[refused] == 1)
