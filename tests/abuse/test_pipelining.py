"""Many requests on one connection before the first answer: all are answered in order, or nobody waits for them."""

import contextlib
import json
import time
from contextlib import ExitStack

from support.attacks.abuse import Abused
from support.servers.raw_http import connected, post, read_reply, reset

ROUNDS = 60


def test_answers_in_order(abused: Abused) -> None:
    pictures = list(abused.samples.items())

    def attack() -> None:
        with connected(abused.port) as client:
            requests = (post("/v1/caption", picture.read_bytes()) for picture, _ in pictures)
            client.sendall(b"".join(requests) * (ROUNDS // len(pictures)))
            for turn in range(ROUNDS):
                status, body = read_reply(client)
                assert status == 200, body
                assert json.loads(body)["caption"] == pictures[turn % len(pictures)][1]

    abused.withstands(attack)


def test_nobody_reads_the_answers(abused: Abused) -> None:
    """Thirty connections that have sent a thousand requests each, read nothing, and leave without a word."""
    probes = b"GET /startup HTTP/1.1\r\nHost: a\r\n\r\n" * 1_000

    def attack() -> None:
        with ExitStack() as exits:
            clients = [exits.enter_context(connected(abused.port)) for _ in range(30)]
            for client in clients:
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):  # the server reads no further, as nobody reads it
                    client.sendall(probes)
            time.sleep(1)
            for client in clients:
                reset(client)

    abused.withstands(attack)


def test_tiny_requests(abused: Abused) -> None:
    """Fourteen thousand requests in a quarter of a mebibyte, twenty times: few of each are taken in at a time."""
    tiny = b"GET /x HTTP/1.1\r\n\r\n"
    data = tiny * ((256 << 10) // len(tiny))

    def attack() -> None:
        with ExitStack() as exits:
            clients = [exits.enter_context(connected(abused.port)) for _ in range(20)]
            for client in clients:
                client.setblocking(False)
                with contextlib.suppress(OSError):
                    client.sendall(data)
            time.sleep(1)
            for client in clients:
                reset(client)

    damage = abused.withstands(attack)
    assert damage.window.peak < damage.before + (64 << 20), damage


def test_a_thousand_connections(abused: Abused) -> None:
    """One request each, one after the other, every second of them left before its answer."""
    picture, caption = next(iter(abused.samples.items()))
    request = post("/v1/caption", picture.read_bytes())

    def attack() -> None:
        for turn in range(1_000):
            with connected(abused.port) as client:
                client.sendall(request if turn % 10 == 0 else b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
                if turn % 2:
                    reset(client)
                    continue
                status, body = read_reply(client)
                assert status == 200, body
                if turn % 10 == 0:
                    assert json.loads(body)["caption"] == caption

    abused.withstands(attack)
