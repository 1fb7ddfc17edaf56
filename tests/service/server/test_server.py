"""uvicorn in a thread: binding, draining, and an exit that a stalled upload cannot hold up."""

import http.client
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.servers.live_app import create_app

from snapcap.service.api.app import Services
from snapcap.service.config.settings import HttpLimits, HttpSettings
from snapcap.service.http.bodies import BodyLimits
from snapcap.service.http.connections import Connections
from snapcap.service.readiness import State
from snapcap.service.server.http_process import Server
from snapcap.service.server.serve import BindError, bind

PATIENCE = 30.0


class Running:
    """A server on a free port. Its body timeout is long: what ends a stalled upload is the grace period."""

    def __init__(self, services: Services, **settings: float) -> None:
        live = threading.Event()
        app = create_app(services, BodyLimits(1 << 20, 3600.0))
        self.listener = bind("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.services = services
        self.server = Server(app, HttpSettings(**settings), services.readiness, live.set, Connections(HttpLimits()))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.thread.start()
        assert live.wait(PATIENCE)

    def get(self, path: str) -> int:
        return self._request("GET", path)[0]

    def caption(self, image: bytes) -> tuple[int, bytes]:
        return self._request("POST", "/v1/caption", image)

    def _request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request(method, path, body)
        reply = connection.getresponse()
        answer = reply.status, reply.read()
        connection.close()
        return answer

    def stalled_upload(self) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        client.sendall(b"POST /v1/caption HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
        self.until(lambda: self.in_flight() == 1)
        return client

    def in_flight(self) -> float | None:
        return self.services.registry.get_sample_value("snapcap_requests_in_flight")

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def stop(self) -> None:
        self.server.begin_exit()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@pytest.fixture
def run(services: Services) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def start(**settings: float) -> Running:
        running.append(Running(services, **settings))
        return running[-1]

    yield start
    for each in running:
        each.stop()


def test_a_drain_answers_503_first_then_finishes_what_runs(run, engine, image) -> None:
    server = run(drain_delay=3600.0, grace_period=PATIENCE)
    engine.gate.clear()
    replies: list[tuple[int, bytes]] = []
    client = threading.Thread(target=lambda: replies.append(server.caption(image(5))))
    client.start()
    assert engine.submitted.wait(PATIENCE)
    assert server.get("/readyz") == 200

    server.server.handle_exit(signal.SIGTERM, None)
    server.until(lambda: server.get("/readyz") == 503)
    assert server.get("/livez") == 200

    server.server._close_at = 0.0  # the delay is over
    server.until(lambda: server.listener.fileno() == -1)
    with pytest.raises(OSError, match=r"refused"):
        socket.create_connection(("127.0.0.1", server.port), PATIENCE)
    assert server.thread.is_alive()  # waits for the request that runs
    engine.gate.set()
    client.join(PATIENCE)
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive()
    assert replies[0][0] == 200
    assert b'"5 7"' in replies[0][1]


def test_a_stalled_upload_does_not_outlive_the_grace_period(run) -> None:
    server = run(grace_period=1.0)
    client = server.stalled_upload()
    server.server.handle_exit(signal.SIGTERM, None)
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive()
    assert server.services.readiness.state is State.DRAINING
    assert server.services.registry.get_sample_value("snapcap_requests_total", {"api": "caption", "code": "503"})
    client.close()


def test_a_body_above_the_limit_is_answered_while_it_is_sent(run, image) -> None:
    server = run()
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as client:
        client.sendall(b"POST /v1/caption HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n")
        for _ in range(100):
            client.sendall(b"x" * (1 << 20))
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"HTTP/1.1 200 OK" in client.makefile("rb").read()
    assert server.caption(image())[0] == 200


def test_a_client_that_hangs_up_frees_its_place(run, engine, image) -> None:
    server = run()
    engine.gate.clear()
    data = image()
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as client:
        client.sendall(b"POST /v1/caption HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
        assert engine.submitted.wait(PATIENCE)
    server.until(engine.requests[0].future.cancelled)
    server.until(lambda: server.in_flight() == 0)


@pytest.mark.parametrize("failed", [False, True])
def test_a_second_signal_ends_the_process_at_once(
    failed: bool, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that ends because it has failed keeps the status and the last line of the failure at the first."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    app, connections = create_app(services, BodyLimits(1, 1)), Connections(HttpLimits())
    server = Server(app, HttpSettings(), services.readiness, print, connections)
    if failed:
        server.begin_exit()
    server.handle_exit(signal.SIGTERM, None)
    assert statuses == []
    server.handle_exit(signal.SIGINT, None)
    assert statuses == [130]


def test_a_taken_port_is_one_clear_line() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            BindError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .* choose with --host and --port"
        ):
            bind("127.0.0.1", port)


def test_a_host_that_does_not_exist_is_one_clear_line() -> None:
    for host in ("host.invalid", "two..dots", "x" * 64):
        with pytest.raises(BindError, match=rf"cannot listen on {re.escape(host)}:80: "):
            bind(host, 80)


@pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_with_the_brackets_of_a_url(host: str) -> None:
    with bind(host, 0) as listener:
        assert listener.getsockname()[0] == "::1"


def test_connections_wait_from_the_moment_of_the_bind() -> None:
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), PATIENCE):
        pass
