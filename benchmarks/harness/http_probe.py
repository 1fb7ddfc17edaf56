"""Sends requests over a keep-alive HTTP/1.1 connection, without a library.

A library's import and overhead would be part of the measurement.
"""

import json
import socket
from typing import Any, NamedTuple

BINARY = "application/octet-stream"


class Reply(NamedTuple):
    """Status and body of a reply."""

    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """A connection to a port of this machine. Raises `OSError` if it is refused or lost."""

    def __init__(self, port: int, timeout: float = 120.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def request(self, path: str, body: bytes | None = None, content_type: str = BINARY) -> Reply:
        """Sends a GET, or a POST if there is a body, and waits for the reply."""
        self._socket.sendall(request_bytes(path, body, content_type))
        while b"\r\n\r\n" not in self._buffer:
            self._receive()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        length = content_length(head)
        while len(self._buffer) < length:
            self._receive()
        content, self._buffer = self._buffer[:length], self._buffer[length:]
        return Reply(int(head[9:12]), content)

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> None:
        chunk = self._socket.recv(65536)
        if not chunk:
            raise ConnectionResetError("the server closed the connection")
        self._buffer += chunk


def request_bytes(
    path: str, body: bytes | None = None, content_type: str = BINARY, *, close: bool = False
) -> bytes:
    """Returns the bytes of a GET, or of a POST if there is a body."""
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\n"
    head += "Connection: close\r\n" if close else ""
    if body is None:
        return f"{head}\r\n".encode()
    return f"{head}Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def content_length(head: bytes, default: int | None = None) -> int:
    """Returns the Content-Length of a head.

    Raises:
        ValueError: there is no Content-Length and no default. Every reply measured here has one.
    """
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    if default is None:
        raise ValueError(f"a reply without Content-Length: {head!r}")
    return default
