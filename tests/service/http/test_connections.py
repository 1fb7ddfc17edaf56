"""How many connections there are, who has to leave for another, and clients that do not read."""

import json
import logging
import resource
import socket
import time
from contextlib import ExitStack
from functools import partial

import pytest
from support.servers.bounded_server import BoundedServer, reply, rest, until

from snapcap.service.config.settings import HttpLimits
from snapcap.service.http.connections import NO_ROOM, SPARE, Connections, HeadTimeout, RefusalLog
from snapcap.service.limits import TooManyConnections
from snapcap.service.server.http_process import connection_limits

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
UPLOAD = b"POST /v1/caption HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf"
YOUNG = "snapcap.service.http.connections._YOUNG"


def in_flight(server: BoundedServer) -> float | None:
    return server.services.registry.get_sample_value("snapcap_requests_in_flight")


def open_now(server: BoundedServer) -> int:
    return len(server.connections.all)


def test_the_one_that_waits_the_longest_makes_room(services, monkeypatch) -> None:
    monkeypatch.setattr(YOUNG, 0.2)
    limits = HttpLimits(max_connections=3, header_timeout=60.0)  # which a busy machine does not reach before
    with BoundedServer(services, limits) as server, ExitStack() as exits:
        half, idle, busy = (exits.enter_context(server.connect()) for _ in range(3))
        half.sendall(b"GET /livez HT")
        until(lambda: len(server.connections.heads) == 1)
        time.sleep(0.01)  # The clock of uvloop counts milliseconds: within one, either may make room.
        idle.sendall(LIVEZ)
        assert reply(idle)[0] == 200
        until(lambda: in_flight(server) == 0)  # or the next line would see the one that has its reply
        busy.sendall(UPLOAD)
        until(lambda: in_flight(server) == 1)
        time.sleep(0.3)
        for waits in (half, idle):  # in this order
            with server.connect() as newcomer:
                newcomer.sendall(MODELS)
                assert reply(newcomer)[0] == 200
                assert rest(waits) == b""
                time.sleep(0.3)
            until(lambda: open_now(server) < 3)
            exits.enter_context(server.connect()).sendall(UPLOAD)
            until(lambda: open_now(server) == 3)
        assert server.closed("made_room") == 2
        assert busy.send(b"!" * 96) == 96
        assert reply(busy)[0] == 422  # it was served to its end


def test_probes_have_room_where_nobody_waits(services) -> None:
    limits = HttpLimits(max_connections=2, header_timeout=60.0)
    with BoundedServer(services, limits) as server, ExitStack() as exits:
        for _ in range(2):
            exits.enter_context(server.connect()).sendall(UPLOAD)
        until(lambda: in_flight(server) == 2)
        with server.connect() as probe:
            probe.sendall(LIVEZ)
            assert reply(probe)[0] == 200
            probe.sendall(LIVEZ + MODELS)
            assert reply(probe)[0] == 200
            answer = rest(probe)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer
        assert b"connection: close" in answer
        assert b"too_many_connections" in answer
        assert server.closed("max_connections") == 1
        late = [exits.enter_context(server.connect()) for _ in range(SPARE)]
        for client in late:
            client.sendall(UPLOAD[:20])
        until(lambda: open_now(server) == 2 + SPARE)
        with server.connect() as probe:  # the oldest of those that have not asked yet makes room for it
            probe.sendall(LIVEZ)
            assert reply(probe)[0] == 200
            until(lambda: open_now(server) == 2 + SPARE)
        assert rest(late[0]).startswith(b"HTTP/1.1 503 ")
    assert open_now(server) == 0


def test_a_connection_beyond_the_limit_serves_all_once_there_is_room(services) -> None:
    with BoundedServer(services, HttpLimits(max_connections=1)) as server, server.connect() as late:
        with server.connect() as first:
            first.sendall(LIVEZ)
            assert reply(first)[0] == 200
            late.sendall(LIVEZ)
            assert reply(late)[0] == 200
        until(lambda: open_now(server) == 1)
        late.sendall(MODELS)
        assert reply(late)[0] == 200


DOCUMENT = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"  # larger than a small buffer


def test_one_that_does_not_read_is_closed_when_another_needs_its_place(services, monkeypatch) -> None:
    """Not only counted as closed: nobody would watch it any more."""
    monkeypatch.setattr(YOUNG, 0.2)
    limits = HttpLimits(max_connections=1, send_timeout=60)
    with BoundedServer(services, limits) as server, server.connect(receive_buffer=2048) as deaf:
        deaf.sendall(DOCUMENT)
        until(lambda: any(each.unsent() for each in list(server.connections.idle)))
        time.sleep(0.3)
        with server.connect() as newcomer:
            newcomer.sendall(MODELS)
            assert reply(newcomer)[0] == 200
            until(lambda: open_now(server) == len(server.server.server_state.connections) == 1)
        assert server.closed("made_room") == 1


def test_one_that_was_to_leave_is_watched_until_it_has(services) -> None:
    """Also where closing it waits for a client that does not read."""

    class Deaf:
        unsent_since: float | None = None
        aborted = False

        def unsent(self) -> int:
            return 1

        def close_idle(self) -> None:
            pass

        def abort(self) -> None:
            self.aborted = True

    watch, deaf = Connections(HttpLimits(max_connections=1, send_timeout=60)), Deaf()
    assert watch.admit(deaf, 0.0)
    assert watch.admit(Deaf(), 2.0), "it has its place"
    for now in (2.0, 5.0):
        watch._expire(now)
    assert deaf.aborted
    watch.forget(deaf)
    assert not watch._leaving


def test_probes_have_room_where_those_beyond_the_limit_do_not_read(services, monkeypatch) -> None:
    monkeypatch.setattr("snapcap.service.http.connections.SPARE", 2)
    limits = HttpLimits(max_connections=1, send_timeout=60)
    with BoundedServer(services, limits) as server, ExitStack() as exits:
        exits.enter_context(server.connect()).sendall(UPLOAD)
        until(lambda: in_flight(server) == 1)
        for _ in range(2):
            exits.enter_context(server.connect(receive_buffer=2048)).sendall(METRICS * 8)
        until(lambda: unread(server) == 2)
        for _ in range(2):
            with server.connect() as probe:
                probe.sendall(LIVEZ)
                assert reply(probe)[0] == 200


def test_what_is_sent_to_a_probe_is_not_taken_for_one(services) -> None:
    with BoundedServer(services, HttpLimits(max_connections=1)) as server, ExitStack() as exits:
        exits.enter_context(server.connect()).sendall(UPLOAD)
        until(lambda: in_flight(server) == 1)
        with server.connect() as client:
            client.sendall(UPLOAD.replace(b"/v1/caption", b"/livez"))
            assert reply(client)[0] == 503


def test_open_connections_are_a_metric(services) -> None:
    connections = Connections(HttpLimits())
    services.metrics.connections.set_function(lambda: len(connections.all))
    assert services.registry.get_sample_value("snapcap_http_connections") == 0


def test_the_limit_leaves_files_for_everything_else(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 2000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    monkeypatch.setattr("snapcap.service.server.http_process.memory_limit", lambda: 16 << 30)
    with caplog.at_level(logging.WARNING, "snapcap.server"):
        assert connection_limits(HttpLimits()).max_connections == 2000 - SPARE - 256
        assert caplog.records == []
        assert connection_limits(HttpLimits(max_connections=5000)).max_connections == 2000 - SPARE - 256
    assert asked == [(2000, 2000)] * 2
    assert caplog.records[0].fields["wanted"] == 5000
    assert connection_limits(HttpLimits(max_connections=10)).max_connections == 10
    assert len(asked) == 2
    monkeypatch.setattr("snapcap.service.server.http_process.memory_limit", lambda: 1 << 30)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert connection_limits(HttpLimits()).max_connections == 256


# Clients that do not read


def page(server: BoundedServer) -> socket.socket:
    """A client that asks for a large page and does not read it."""
    client = server.connect(receive_buffer=1024)
    client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 8)
    return client


def unread(server: BoundedServer) -> int:
    return sum(connection.unsent() > 0 for connection in list(server.connections.all))


def test_a_client_that_never_reads_is_closed(services) -> None:
    with BoundedServer(services, HttpLimits(send_timeout=0.5)) as server, page(server):
        until(lambda: server.closed("send_timeout") == 1)
        until(lambda: open_now(server) == 0)


def test_a_client_that_reads_late_gets_it_all(services) -> None:
    with BoundedServer(services) as server, page(server) as client:
        until(lambda: unread(server) == 1)
        time.sleep(0.5)
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = rest(client)
        assert answers.count(b"HTTP/1.1 200 OK") == 9
        assert answers.endswith(b'{"status":"live"}')


def test_an_exit_waits_neither_long_nor_loudly_for_clients_that_never_read(
    services, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as exits:
        server = exits.enter_context(BoundedServer(services, grace_period=60.0))
        for _ in range(50):
            exits.enter_context(page(server))
        until(lambda: unread(server) == 50)
        with caplog.at_level(logging.WARNING):
            server.stop()  # which waits half as long as the grace period
        assert caplog.records == []


def test_what_runs_at_the_end_of_the_grace_period_is_told_to_come_again(
    services, engine, image, caplog: pytest.LogCaptureFixture
) -> None:
    engine.gate.clear()
    data = image()
    with BoundedServer(services, grace_period=0.5) as server, server.connect() as client:
        client.sendall(b"POST /v1/caption HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
        assert engine.submitted.wait(30)
        with caplog.at_level(logging.INFO):
            server.stop()
        answer = rest(client)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after" in answer.lower()
    assert engine.requests[0].future.cancelled()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    (line,) = [record.fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]
    assert (line["status"], line["code"], line["phase"]) == (503, "not_ready", "draining")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["request_id"] == line["request_id"]
    rejected = partial(services.registry.get_sample_value, "snapcap_requests_rejected_total")
    assert rejected({"reason": "not_ready"}) == 1
    assert rejected({"reason": "client_disconnected"}) == 0


def test_a_page_that_may_ask_reads_why_it_is_refused_before_the_application(
    services, caplog: pytest.LogCaptureFixture
) -> None:
    mine, other = b"https://app.example.com", b"https://other.example"
    limits = HttpLimits(max_connections=2, max_header_bytes=2048, header_timeout=0.2)
    caplog.set_level(logging.INFO, "snapcap.access")
    with BoundedServer(services, limits, origins=(mine.decode(),)) as server, ExitStack() as exits:
        server.connections.refusals = RefusalLog(lambda: 0.0)  # all of them within one second
        begun = b"POST /v1/caption HTTP/1.1\r\nHost: x\r\nOrigin: "
        cases = {b"431": b"\r\nX: " + b"x" * 4096, b"408": b"\r\nX: half"}
        for status, more in cases.items():
            for origin in (mine, other):
                with server.connect() as client:
                    client.sendall(begun + origin + more)
                    answer = rest(client)
                assert answer.startswith(b"HTTP/1.1 " + status)
                assert (b"access-control-allow-origin: " + mine + b"\r\n" in answer) == (origin == mine)
                assert b"vary: Origin\r\n" in answer
                assert other not in answer
        for _ in range(2):
            exits.enter_context(server.connect()).sendall(UPLOAD)
        until(lambda: in_flight(server) == 2)
        caplog.clear()
        for _ in range(3):
            with server.connect() as crowded:
                crowded.sendall(MODELS.replace(b"\r\n\r\n", b"\r\nOrigin: " + mine + b"\r\n\r\n"))
                answer = rest(crowded)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"access-control-allow-origin: " + mine in answer.lower()
    lines = [record.fields for record in caplog.records if record.getMessage() == "request refused"]  # type: ignore[attr-defined]
    crowded_lines = [line for line in lines if line["code"] == "too_many_connections"]
    line = {"status": 503, "client": "127.0.0.1", "code": "too_many_connections", "reason": "max_connections"}
    assert crowded_lines == [line], "at most one a second"


def test_a_crowd_has_a_line_a_second_which_says_how_many_had_none(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    caplog.set_level(logging.INFO, "snapcap.access")
    log = RefusalLog(lambda: now)
    for moment in (0.0, 0.1, 0.9, 1.1, 3.0):
        now = moment
        log.write(TooManyConnections(), NO_ROOM, ("::1", 1))
    log.write(HeadTimeout(), "head_timeout", ("::1", 1))
    log.write(HeadTimeout(), "head_timeout", ("::1", 1))
    fields = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [(each["code"], each.get("left_out")) for each in fields] == [
        ("too_many_connections", None),
        ("too_many_connections", 2),
        ("too_many_connections", None),
        ("head_timeout", None),
        ("head_timeout", None),
    ]
