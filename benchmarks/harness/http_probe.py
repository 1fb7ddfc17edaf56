"""Asks over a keep-alive HTTP/1.1 connection, in a few lines.

The import and the overhead of a library would be part of the measurement.
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
    """One connection to a port of this machine; `OSError` where it is refused or lost."""

    def __init__(self, port: int, timeout: float = 120.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def request(self, path: str, body: bytes | None = None, content_type: str = BINARY) -> Reply:
        """GET, or POST where there is a body, and wait for the reply."""
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
    """A whole request, ready to be sent: GET, or POST where there is a body."""
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\n"
    head += "Connection: close\r\n" if close else ""
    if body is None:
        return f"{head}\r\n".encode()
    return f"{head}Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def content_length(head: bytes, default: int | None = None) -> int:
    """The Content-Length of a head; without a default it must have one, as every reply measured here does."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    if default is None:
        raise ValueError(f"a reply without Content-Length: {head!r}")
    return default
