"""Sends HTTP as bytes on a socket: what a client's library would refuse to send."""

import contextlib
import socket
import struct
from collections.abc import Iterator, Mapping


def post(path: str, body: bytes = b"", fields: Mapping[str, str] | None = None) -> bytes:
    """A whole request. ``fields`` come after Host and, unless among them, Content-Length."""
    given = dict(fields or {})
    if not {"content-length", "transfer-encoding"} & {name.lower() for name in given}:
        given["Content-Length"] = str(len(body))
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode("latin-1") + body


@contextlib.contextmanager
def connected(port: int, timeout: float = 60.0) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield client


def exchange(port: int, data: bytes, timeout: float = 60.0) -> bytes:
    """Send bytes, say that there are no more, and return all that comes until the server closes."""
    with connected(port, timeout) as client:
        with contextlib.suppress(OSError):  # the reply may come, and the connection end, before all is sent
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        return read_all(client)


def read_all(client: socket.socket) -> bytes:
    """All that comes until the server closes, or resets, the connection. TimeoutError when it does neither."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while chunk := client.recv(65536):
            received += chunk
    return received


def read_reply(client: socket.socket) -> tuple[int, bytes]:
    """Status and body of one reply that has a Content-Length. Reads no byte of the next reply, which may be there.

    Raises:
        ConnectionResetError: the server closed the connection before its end.
    """
    head, body = b"", b""
    while not head.endswith(b"\r\n\r\n"):
        head += _some(client, 1)
    fields = (line.partition(b":") for line in head.lower().split(b"\r\n")[1:])
    length = next(int(value) for name, _, value in fields if name == b"content-length")
    while len(body) < length:
        body += _some(client, length - len(body))
    return int(head.split()[1]), body


def _some(client: socket.socket, most: int) -> bytes:
    chunk = client.recv(most)
    if not chunk:
        raise ConnectionResetError("closed before the end of a reply")
    return chunk


def statuses(received: bytes) -> list[int]:
    """Returns the statuses of all replies on a connection, if no body contains a status line."""
    return [int(piece[:3]) for piece in received.split(b"HTTP/1.1 ")[1:]]


def reset(client: socket.socket) -> None:
    """Closes a connection so that the server gets an RST."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
