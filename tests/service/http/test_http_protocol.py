"""Bytes that no well-behaved client sends, and what RFC 9112 has to say about them."""

import base64
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from support.servers.bounded_server import BoundedServer, refused, reply, rest, until

from snapcap.service.config.settings import HttpLimits

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
POST = b"POST /v1/caption HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def server(services) -> Iterator[BoundedServer]:
    with BoundedServer(services, HttpLimits(max_header_bytes=8192, max_headers=50)) as server:
        yield server
        assert server.ask(LAST).startswith(b"HTTP/1.1 200 ")  # whatever the test has sent


# Heads


def test_a_head_with_too_many_bytes(server: BoundedServer) -> None:
    field = b"X-Field: " + b"x" * 1000 + b"\r\n"
    refused(server.ask(b"GET /livez HTTP/1.1\r\n" + field * 9 + b"\r\n"), 431, "head_too_large")
    refused(server.ask(b"GET /livez HTTP/1.1\r\nX-Field: " + b"x" * 100_000), 431, "head_too_large")
    assert server.closed("head_too_large") == 2


def test_a_head_that_goes_on_for_ever_is_not_kept(server: BoundedServer) -> None:
    with server.connect() as client:
        client.sendall(b"GET /livez HTTP/1.1\r\n")
        sent = 0
        try:
            while sent < 100 << 20:
                client.sendall(b"a:b\r\n" * 20_000)
                sent += 100_000
        except OSError:  # the server has closed
            return
        refused(rest(client), 431, "head_too_large")


def test_a_head_with_too_many_fields(server: BoundedServer) -> None:
    head = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + b"a:b\r\n" * 48
    assert server.ask(head + b"\r\n").startswith(b"HTTP/1.1 200 ")
    refused(server.ask(head + b"a:b\r\n\r\n"), 431, "head_too_large")


def test_a_url_that_is_too_long(server: BoundedServer) -> None:
    refused(server.ask(b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\n\r\n"), 414, "url_too_long")


def test_a_head_in_single_bytes(server: BoundedServer) -> None:
    with server.connect() as client:
        for byte in LAST:
            client.send(bytes([byte]))
        assert rest(client).startswith(b"HTTP/1.1 200 ")


def test_line_breaks_without_a_request(server: BoundedServer) -> None:
    assert server.ask(b"\r\n\r\n" + LAST).startswith(b"HTTP/1.1 200 ")
    refused(server.ask(b"\r\n" * 100_000), 431, "head_too_large")


@pytest.mark.parametrize(
    ("fresh", "part"),
    [(fresh, part) for fresh in (True, False) for part in (b"G", b"GET /livez HTTP/1.1\r\nHost: x\r\n")]
    + [(True, b"\r\n")],
)
def test_half_a_head_does_not_stay(services, fresh: bool, part: bytes) -> None:
    with BoundedServer(services, HttpLimits(header_timeout=0.5)) as server:
        with server.connect() as client:
            if not fresh:
                client.sendall(LIVEZ)
                assert reply(client)[0] == 200
            client.sendall(part)
            refused(rest(client), 408, "head_timeout")
        assert server.closed("head_timeout") == 1
        until(lambda: not server.connections.all)


def test_a_head_that_drips_does_not_stay(services) -> None:
    with BoundedServer(services, HttpLimits(header_timeout=0.5)) as server, server.connect() as client:
        client.sendall(b"GET /livez HTTP/1.1\r\n")
        end = time.monotonic() + 30
        while time.monotonic() < end and not server.closed("head_timeout"):
            client.sendall(b"a:b\r\n")
            time.sleep(0.05)
        refused(rest(client), 408, "head_timeout")


def test_an_idle_connection_does_not_stay(services) -> None:
    with BoundedServer(services) as server:
        with server.connect() as silent, server.connect() as used:
            used.sendall(LIVEZ)
            assert reply(used)[0] == 200
            server.connections.limits = HttpLimits(keep_alive_timeout=0.5)  # not before: it is to have a reply
            assert rest(silent) == rest(used) == b""
        until(lambda: not server.connections.all)


# Bodies


def test_what_frames_the_chunks_is_bounded(server: BoundedServer) -> None:
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    refused(server.ask(head + b"1;" + b"x" * 100_000 + b"\r\n"), 400, "malformed_request")
    refused(server.ask(head + b"1\r\nx\r\n" * 100_000), 400, "malformed_request")


def test_trailers_are_bounded_and_nobodys_headers(server: BoundedServer, image) -> None:
    data = image(5)
    head = POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(data), data)
    answer = server.ask(head + b"X-Request-Id: from-a-trailer\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"from-a-trailer" not in answer
    refused(server.ask(head + b"a:b\r\n" * 50_000 + b"\r\n"), 431, "head_too_large")
    refused(server.ask(head + b"a: " + b"x" * 50_000), 400, "malformed_request")


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", b"0\r\n\r\n"),
        (b"Content-Length: 5\r\nContent-Length: 6\r\n", b"hello"),
        (b"Content-Length: 5\r\nContent-Length: 5\r\n", b"hello"),
        (b"Content-Length: 5, 5\r\n", b"hello"),
        (b"Content-Length: -1\r\n", b"hello"),
        (b"Content-Length: +5\r\n", b"hello"),
        (b"Content-Length: 0x5\r\n", b"hello"),
        (b"Content-Length: 99999999999999999999999\r\n", b"hello"),
        (b"Content-Length : 5\r\n", b"hello"),
        (b"Transfer-Encoding: chunked\r\n", b"ffffffffffffffffff\r\nhello"),
        (b"Transfer-Encoding: chunked\r\n", b"-1\r\nhello\r\n0\r\n\r\n"),
        (b"Transfer-Encoding: chunked\r\n", b"5\r\nhelloworld\r\n0\r\n\r\n"),
        (b"Transfer-Encoding: chunked\r\n", b"5\nhello\n0\n\n"),
        (b"Transfer-Encoding: chunked, identity\r\n", b"0\r\n\r\n"),
        (b"Transfer-Encoding: chunked, chunked\r\n", b"0\r\n\r\n"),
        (b"X-Folded: one\r\n two\r\n", b""),
        (b"X-Bare: one\ntwo: three\r\n", b""),
        (b"X-Return: one\rtwo\r\n", b""),
        (b"X-Null: one\0two\r\n", b""),
        (b"No colon\r\n", b""),
        (b": no name\r\n", b""),
    ],
)
def test_what_two_parsers_could_read_differently(server: BoundedServer, fields: bytes, body: bytes) -> None:
    smuggled = b"GET /startup HTTP/1.1\r\nHost: x\r\n\r\n"
    refused(server.ask(POST + fields + b"\r\n" + body + smuggled), 400, "malformed_request")
    assert server.closed("malformed") == 1


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip\r\nTransfer-Encoding: chunked"])
def test_a_coding_that_is_not_read_is_refused(server: BoundedServer, coding: bytes) -> None:
    answer = server.ask(POST + b"Transfer-Encoding: " + coding + b"\r\n\r\n0\r\n\r\n")
    refused(answer, 400, "malformed_request")


def test_chunks_in_http_1_0_are_refused(server: BoundedServer) -> None:
    answer = server.ask(b"POST /v1/caption HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    refused(answer, 400, "malformed_request")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /livez\r\n\r\n",
        b"GET /livez HTTP/2.0\r\n\r\n",
        b"\0",
    ],
)
def test_what_is_not_http(server: BoundedServer, data: bytes) -> None:
    refused(server.ask(data), 400, "malformed_request")


@pytest.mark.parametrize("target", [b"CONNECT x:80", b"OPTIONS *", b"GET \xff", b"GET x", b"GET http://[::1"])
def test_targets_that_are_nowhere(server: BoundedServer, target: bytes) -> None:
    answer = server.ask(target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 4")


def test_the_rest_of_a_body_that_is_refused_is_not_read_for_ever(services, monkeypatch) -> None:
    monkeypatch.setattr("snapcap.service.http.connections._LINGER", 0.5)
    with BoundedServer(services) as server, server.connect() as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\nContent-Encoding: br\r\n\r\n")
        assert reply(client)[0] == 415
        client.sendall(b"5\r\nhello\r\n")
        until(lambda: server.closed("body_left_over") == 1)
        until(lambda: not server.connections.all)


def test_a_request_that_is_refused_within_its_body_has_one_code(server: BoundedServer, caplog) -> None:
    caplog.set_level(logging.INFO, "snapcap.access")
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    refused(server.ask(head + b"5\r\nhelloworld\r\n"), 400, "malformed_request")
    until(lambda: len(caplog.records) == 2)
    assert {(each.fields["status"], each.fields["code"]) for each in caplog.records} == {(400, "malformed_request")}  # type: ignore[attr-defined]
    counted = server.services.registry.get_sample_value
    assert counted("snapcap_requests_total", {"api": "caption", "code": "400"}) == 1
    assert counted("snapcap_requests_rejected_total", {"reason": "client_disconnected"}) == 0


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_refusal_reaches_a_client_that_closes_and_still_sends_its_body(services, version: bytes) -> None:
    """Python's urllib and many proxies send `Connection: close` or HTTP/1.0, and read after they have sent all."""
    head = POST.replace(b"1.1", version) + b"Connection: close\r\nContent-Length: 16777216\r\n\r\n"
    with BoundedServer(services) as server, server.connect() as client:
        client.sendall(head)
        client.recv(1, socket.MSG_PEEK)  # waits for the reply: the length exceeds the limit of bodies
        for _ in range(15):
            client.sendall(b"x" * (1 << 20))
            time.sleep(0.01)  # time for a reset to arrive
        client.sendall(b"x" * (1 << 20) + LIVEZ)  # which is not answered: the request said that it is the last
        refused(rest(client), 413, "payload_too_large")
        until(lambda: not server.connections.all)
        assert server.closed("body_left_over") == 0


def test_a_client_that_closes_and_does_not_end_its_body_does_not_stay(services, monkeypatch) -> None:
    monkeypatch.setattr("snapcap.service.http.connections._LINGER", 0.5)
    with BoundedServer(services) as server, server.connect() as client:
        client.sendall(POST + b"Connection: close\r\nContent-Length: 16777216\r\n\r\n")
        refused(rest(client), 413, "payload_too_large")  # though the connection is still there
        until(lambda: server.closed("body_left_over") == 1)
        until(lambda: not server.connections.all)


# Several requests


def test_requests_sent_ahead_are_answered_in_order(server: BoundedServer, image) -> None:
    def post(red: int) -> bytes:
        return POST + b"Content-Length: %d\r\n\r\n%b" % (len(image(red)), image(red))

    data = post(5) + LIVEZ + post(6) + LAST
    for size in (len(data), 7):  # in one packet, and in pieces
        with server.connect() as client:
            for at in range(0, len(data), size):
                client.sendall(data[at : at + size])
            answers = [reply(client) for _ in range(4)]
            assert rest(client) == b""
        assert [status for status, _ in answers] == [200] * 4
        assert [json.loads(body).get("caption") for _, body in answers] == ["5 7", None, "6 7", None]


def test_more_requests_ahead_than_anyone_means(server: BoundedServer) -> None:
    with server.connect() as client:
        client.sendall(LIVEZ * 5000)
        answer = rest(client)
    assert 1 <= answer.count(b"HTTP/1.1 200 OK") < 100
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 200 OK")
    assert answer.rpartition(b"HTTP/1.1 ")[2].count(b"connection: close") == 1


def test_an_error_behind_a_request_waits_for_its_reply(server: BoundedServer, engine, image) -> None:
    engine.gate.clear()
    data = image(5)
    with server.connect() as client:
        client.sendall(POST + b"Content-Length: %d\r\n\r\n%bnot HTTP at all\r\n\r\n" % (len(data), data))
        until(lambda: server.closed("malformed") == 1)
        engine.gate.set()
        answer = rest(client)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


def test_an_error_in_a_body_is_its_reply(server: BoundedServer) -> None:
    with server.connect() as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        metric = "snapcap_requests_in_flight"
        until(lambda: server.services.registry.get_sample_value(metric) == 1)
        client.sendall(b"not a chunk\r\n")
        refused(rest(client), 400, "malformed_request")
        until(lambda: server.services.registry.get_sample_value(metric) == 0)


def test_empty_lines_behind_a_body_are_no_head(services, image) -> None:
    """Old clients send them; the connection is idle all the same."""
    with BoundedServer(services, HttpLimits(header_timeout=0.3)) as server, server.connect() as client:
        client.sendall(POST + b"Content-Length: %d\r\n\r\n%b" % (len(image(5)), image(5)))
        assert reply(client)[0] == 200
        client.sendall(b"\r\n")
        time.sleep(2)  # the watch looks once a second
        assert server.closed("head_timeout") == 0
        client.sendall(LAST)
        assert rest(client).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("hosts", [b"", b"Host: a\r\nHost: b\r\n", b"Host: a\r\nhost: a\r\n"])
def test_a_request_has_one_host(server: BoundedServer, hosts: bytes) -> None:
    refused(server.ask(b"GET /livez HTTP/1.1\r\n" + hosts + b"\r\n"), 400, "malformed_request")


@pytest.mark.parametrize("target", ["http://evil.example/startup", "HTTPS://x@Evil.example:80/startup?a=b"])
def test_the_authority_of_an_absolute_url_is_the_host(services, target: str) -> None:
    with BoundedServer(services, hosts=("ours.example",)) as server:
        head = "GET {} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert server.ask(head.format("/startup").encode()).startswith(b"HTTP/1.1 200 ")
        assert server.ask(head.format("http://ours.example/startup").encode()).startswith(b"HTTP/1.1 200 ")
        refused(server.ask(head.format(target).encode()), 421, "host_refused")


def test_a_request_of_http_1_0_needs_no_host(server: BoundedServer) -> None:
    assert server.ask(b"GET /livez HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def chat(image: bytes, **fields: object) -> bytes:
    """The body of a chat completion."""
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    return json.dumps({"model": "fake", "messages": [message], **fields}).encode()


def test_a_stream_to_http_1_0_ends_with_the_connection(server: BoundedServer, image: Callable[..., bytes]) -> None:
    """Such a client does not know chunks: it would take their sizes for content."""
    body = chat(image(5), stream=True)
    ask = b"POST /v1/chat/completions HTTP/1.%d\r\nHost: x\r\nContent-Length: %d\r\nConnection: %s\r\n\r\n%b"
    chunked = server.ask(ask % (1, len(body), b"close", body))
    assert b"\r\ntransfer-encoding: chunked\r\n" in chunked
    for connection in (b"close", b"keep-alive"):
        head, _, events = server.ask(ask % (0, len(body), connection, body)).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"content-length" not in head
        assert b"\r\nconnection: close" in head
        assert events.startswith(b"data: {")
        assert events.endswith(b"data: [DONE]\n\n")
        assert all(event.startswith(b"data: ") for event in events.split(b"\n\n")[:-1])


def test_a_whole_reply_to_http_1_0_has_its_length(server: BoundedServer, image: Callable[..., bytes]) -> None:
    body = chat(image(5))
    ask = b"POST /v1/chat/completions HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n%b"
    head, _, content = server.ask(ask % (len(body), body)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")  # and not 100, which such a client does not know either
    assert b"\r\ncontent-length: %d\r\n" % len(content) in head
    assert json.loads(content)["object"] == "chat.completion"
    head, _, content = server.ask(b"HEAD /livez HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert (b"\r\ncontent-length: " in head, content) == (True, b"")
