"""Runs the application behind the real server in a thread, with clients that speak bytes."""

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from support.servers.live_app import create_app

from snapcap.service.api.app import Services
from snapcap.service.config.settings import HttpLimits, HttpSettings
from snapcap.service.http.bodies import BodyLimits
from snapcap.service.http.connections import Connections
from snapcap.service.server.http_process import Server
from snapcap.service.server.serve import bind

PATIENCE = 30.0


class BoundedServer:
    """A server on a free port; a context manager that ends it."""

    def __init__(
        self,
        services: Services,
        limits: HttpLimits | None = None,
        bodies: BodyLimits | None = None,
        grace_period: float = 5.0,
        origins: tuple[str, ...] = (),
        hosts: tuple[str, ...] = ("*",),
    ) -> None:
        live = threading.Event()
        self.services = services
        self.app = create_app(
            services, bodies or BodyLimits(1 << 20, 30.0), HttpSettings(origins=origins, hosts=hosts)
        )
        self.listener = bind("127.0.0.1", 0)
        # The kernel's buffer is small, so that replies which a client does not read soon stay in the process.
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
        self.port = self.listener.getsockname()[1]
        closed = services.metrics.connection_closed
        self.connections = Connections(limits or HttpLimits(), closed, frozenset(origins))
        settings = HttpSettings(grace_period=grace_period)
        self.server = Server(self.app, settings, services.readiness, live.set, self.connections)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.thread.start()
        assert live.wait(PATIENCE)

    def __enter__(self) -> "BoundedServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.server.begin_exit()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()

    def connect(self, **options: int) -> socket.socket:
        """`receive_buffer`: bytes of the client's end."""
        client = socket.socket()
        client.settimeout(PATIENCE)
        if options:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["receive_buffer"])
        client.connect(("127.0.0.1", self.port))
        return client

    def ask(self, data: bytes) -> bytes:
        """Send it all, and what comes back until the server closes."""
        with self.connect() as client:
            client.sendall(data)
            return rest(client)

    def closed(self, reason: str) -> Any:
        """The counter of connections that were closed for a reason."""
        return self.services.registry.get_sample_value("snapcap_http_connections_closed_total", {"reason": reason})


def rest(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    received = b""
    while chunk := client.recv(65536):
        received += chunk
    return received


def reply(client: socket.socket) -> tuple[int, bytes]:
    """Status and body of one reply that names its length."""
    head = b""
    while b"\r\n\r\n" not in head:
        chunk = client.recv(1)
        assert chunk, head
        head += chunk
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
    body = b""
    while len(body) < int(fields[b"content-length"]):
        body += client.recv(int(fields[b"content-length"]) - len(body))
    return int(head.split()[1]), body


def until(condition: Callable[[], bool]) -> None:
    """Poll until it is true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refused(answer: bytes, status: int, code: str) -> None:
    """Asserts that the answer is one complete refusal which ends the connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head
    assert b"content-type: application/problem+json" in head
    assert b"content-length: %d\r\n" % len(body) in head
    problem = json.loads(body)
    assert (problem["status"], problem["code"]) == (status, code)
