"""Requests that ask for another protocol are answered in this one, and keep their bodies."""

import json
from collections.abc import Iterator

import pytest
from support.servers.bounded_server import BoundedServer, refused, reply

from snapcap.service.config.settings import HttpLimits

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
POST = b"POST /v1/caption HTTP/1.1\r\nHost: x\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQ\r\n"


@pytest.fixture
def server(services) -> Iterator[BoundedServer]:
    with BoundedServer(services, HttpLimits(max_header_bytes=8192, max_headers=50)) as server:
        yield server
        assert server.ask(LAST).startswith(b"HTTP/1.1 200 ")  # whatever the test has sent


@pytest.mark.parametrize("size", [1 << 20, 1, 50])
@pytest.mark.parametrize("chunked", [False, True])
def test_javas_client_keeps_its_body(server: BoundedServer, image, size: int, chunked: bool) -> None:
    data = image(5)
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if chunked else data
    length = b"Transfer-Encoding: chunked\r\n" if chunked else b"Content-Length: %d\r\n" % len(data)
    request = POST + UPGRADE + length + b"X-Request-Id: mine\r\n\r\n" + body
    with server.connect() as client:
        for whole in (request, request, request + LIVEZ):
            for at in range(0, len(whole), size):
                client.sendall(whole[at : at + size])
            status, answer = reply(client)
            assert (status, json.loads(answer)["caption"]) == (200, "5 7")
        assert reply(client)[0] == 200


def test_upgrades_sent_ahead(server: BoundedServer, image) -> None:
    data = image(5)
    request = POST + UPGRADE + b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
    with server.connect() as client:
        client.sendall(request * 3)
        assert [reply(client)[0] for _ in range(3)] == [200] * 3


def test_a_websocket_is_an_ordinary_request(server: BoundedServer) -> None:
    head = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with server.connect() as client:
        client.sendall(head + LAST)
        assert [reply(client)[0] for _ in range(2)] == [200, 200]


def test_an_upgrade_on_a_connection_that_closes(server: BoundedServer, image) -> None:
    data = image(5)
    for fields in (b"Connection: close\r\n" + UPGRADE, UPGRADE + b"Connection: close\r\n"):
        answer = server.ask(POST + fields + b"Content-Length: %d\r\n\r\n%b" % (len(data), data) + LIVEZ)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer
        assert answer.count(b"HTTP/1.1 ") == 1


def test_an_upgrade_hides_no_smuggling(server: BoundedServer) -> None:
    head = POST + UPGRADE + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    refused(server.ask(head), 400, "malformed_request")
