"""Clients that send or read slowly, or stop in the middle: they hold their own connection, and nobody else's."""

import base64
import contextlib
import json
import time
from contextlib import ExitStack

from support.attacks.abuse import Abused
from support.servers.raw_http import connected, post, read_reply, reset, statuses

CLIENTS = 100
HEAD = b"POST /v1/caption HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"


def test_slow_senders(abused: Abused) -> None:
    """A hundred bodies of which a byte comes now and then."""

    def attack() -> None:
        with ExitStack() as exits:
            clients = [exits.enter_context(connected(abused.port)) for _ in range(CLIENTS)]
            for client in clients:
                client.sendall(HEAD)
            for _ in range(10):
                for client in clients:
                    client.sendall(b"\x89")
                time.sleep(0.2)

    abused.withstands(attack)


def test_stalled_senders_are_told(impatient: Abused) -> None:
    """A body that stalls is answered 408, and its connection is closed."""

    def attack() -> None:
        with ExitStack() as exits:
            clients = [exits.enter_context(connected(impatient.port)) for _ in range(CLIENTS)]
            for client in clients:
                client.sendall(HEAD)
            for client in clients:
                assert read_reply(client)[0] == 408
                assert client.recv(1) == b""

    impatient.withstands(attack)


def test_slow_readers(abused: Abused) -> None:
    """A hundred clients that ask for a large page with a small window and read it a few bytes at a time."""
    request = b"GET /openapi.json HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"

    def attack() -> None:
        with ExitStack() as exits:
            clients = [exits.enter_context(connected(abused.port)) for _ in range(CLIENTS)]
            for client in clients:
                client.sendall(request)
            for _ in range(10):
                for client in clients:
                    client.recv(64)
                time.sleep(0.1)
            for client in clients:
                reset(client)

    abused.withstands(attack)


def test_clients_that_leave(abused: Abused) -> None:
    """Two hundred captions that nobody waits for: some of the senders leave politely, some do not."""
    request = post("/v1/caption", next(iter(abused.samples)).read_bytes())

    def attack() -> None:
        for turn in range(200):
            with connected(abused.port) as client:
                client.sendall(request if turn % 3 else request[: len(request) // 2])
                if turn % 2:
                    reset(client)

    abused.withstands(attack)


def test_streams_that_nobody_reads(abused: Abused) -> None:
    """Streams of tokens whose readers stop after the first and leave."""
    picture = base64.b64encode(next(iter(abused.samples)).read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}]
    body = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": parts}]}
    request = post("/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})

    def attack() -> None:
        answered = set()
        for _ in range(60):
            with connected(abused.port) as client:
                client.sendall(request)
                answered.update(statuses(client.recv(512)))
                reset(client)
        assert answered <= {200, 429}
        assert 200 in answered

    abused.withstands(attack)


def test_a_flood(abused: Abused) -> None:
    """Ten times as many requests at once as may wait: those for which there is no place are told so at once."""
    request = post("/v1/caption", next(iter(abused.samples)).read_bytes())

    def attack() -> None:
        with ExitStack() as exits:
            clients = [exits.enter_context(connected(abused.port)) for _ in range(160)]
            for client in clients:
                with contextlib.suppress(ConnectionError):
                    client.sendall(request)
            answers = [read_reply(client)[0] for client in clients]
            assert set(answers) <= {200, 429}
            assert answers.count(200) >= 16

    abused.withstands(attack)
