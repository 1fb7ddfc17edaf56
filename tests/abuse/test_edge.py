"""What comes before the application, and bodies on their way: heads, connections, forms, JSON, uploads."""

import contextlib
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.attacks.abuse import Abused
from support.servers.raw_http import connected, exchange, post, read_reply, statuses

MIB = 1 << 20
FIELDS = b"a:b\r\n" * 4_000
HEAD = b"POST /v1/caption HTTP/1.1\r\nHost: a\r\n"
HALF = b"GET /livez HTTP/1.1\r\nHost: a\r\n"
BUDGET = 64 * MIB


@pytest.fixture(scope="module")
def narrow(samples: dict[Path, str], compiled_options: tuple[str, ...]) -> Iterator[Abused]:
    """With little memory for bodies and room for few connections, and times that a test can wait for."""
    options = ("--max-body-memory", str(BUDGET), "--max-connections", "100", "--header-timeout", "2")
    times = ("--body-timeout", "3", "--send-timeout", "3")
    with Abused(samples, *compiled_options, *options, *times) as server:
        yield server


def closed(abused: Abused, reason: str) -> float:
    return abused.server.metrics()[f'snapcap_http_connections_closed_total{{reason="{reason}"}}']


def flood(port: int, head: bytes, piece: bytes, size: int = 24 * MIB) -> bytes:
    """Send a head and then the same again and again, until the server has had enough; what it said."""
    with connected(port) as client:
        client.sendall(head)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < size:
                client.sendall(piece)
                sent += len(piece)
        received = b""
        with contextlib.suppress(OSError):
            while chunk := client.recv(65536):
                received += chunk
        return received


FLOODS = {
    "fields": (HALF, FIELDS),
    "one_field": (HALF + b"X-A: ", b"a" * 65536),
    "one_name": (HALF, b"a" * 65536),
    "url": (b"GET /", b"a" * 65536),
    "method": (b"", b"A" * 65536),
    "line_breaks": (b"", b"\r\n" * 32768),
    "trailers": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", FIELDS),
    "extensions": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1;" + b"a" * 1000 + b"\r\nx\r\n"),
    "tiny_chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 10_000),
    "pipelined": (b"", b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n" * 2_000),
    "upgrades": (b"", HALF + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"),
}


@pytest.mark.parametrize("name", FLOODS)
def test_floods_on_a_connection(abused: Abused, name: str) -> None:
    """24 MiB each of what no request has as much of: refused long before its end, and never held."""
    head, piece = FLOODS[name]

    def attack() -> None:
        for _ in range(3):
            assert set(statuses(flood(abused.port, head, piece))) <= {200, 400, 414, 431}

    abused.withstands(attack)


def test_half_a_head(narrow: Abused) -> None:
    """Five times as many connections with half a head as there may be: others get through, and none of them
    stays."""

    def attack() -> None:
        before = closed(narrow, "made_room") + closed(narrow, "head_timeout")
        with ExitStack() as exits:
            for _ in range(500):
                exits.enter_context(connected(narrow.port)).sendall(HALF)
            end = time.monotonic() + 60
            while narrow.server.metrics()["snapcap_http_connections"] > 20 and time.monotonic() < end:
                time.sleep(0.2)
            assert narrow.server.metrics()["snapcap_http_connections"] <= 20
        assert closed(narrow, "made_room") + closed(narrow, "head_timeout") > before

    narrow.withstands(attack)


def test_connections_that_are_busy(narrow: Abused) -> None:
    """As many uploads as there may be connections: probes have room, others are told to come again."""

    def attack() -> None:
        with ExitStack() as exits:
            for _ in range(110):
                client = exits.enter_context(connected(narrow.port))
                client.sendall(HEAD + b"Content-Length: 100000\r\n\r\nx")
            answers = []
            for _ in range(20):
                with connected(narrow.port) as client:
                    client.sendall(HALF + b"\r\n")
                    answers.append(read_reply(client)[0])
                time.sleep(0.05)
            assert set(answers) <= {200, 503}
            assert 200 in answers

    narrow.withstands(attack)


@pytest.mark.parametrize("charset", ["punycode", "idna", "undefined", "unicode_escape"])
def test_charsets_of_forms(abused: Abused, charset: str) -> None:
    """400 KB that took a minute to decode, and text that was an error of the server's."""
    field = b'--B\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n' + b"a\xff" * 200_000 + b"\r\n--B--\r\n"
    request = post("/v1/caption", field, {"Content-Type": f"multipart/form-data; boundary=B; charset={charset}"})

    def attack() -> None:
        for _ in range(4):
            assert statuses(exchange(abused.port, request)) == [415]

    abused.withstands(attack)


BODIES: dict[str, Callable[[], bytes]] = {
    "lists": lambda: b"[" + b"[]," * (6 * MIB) + b"[]]",
    "texts": lambda: b"[" + b'"",' * (6 * MIB) + b'""]',
    "quotes": lambda: b'["' + b'\\"' * (9 * MIB) + b'"]',
    "escapes": lambda: b'{"image": "' + b"\\u0041" * (3 * MIB) + b'"}',
    "base64": lambda: b'{"image": "' + b"AAAA" * (4 * MIB) + b'"}',
}


@pytest.mark.parametrize("name", BODIES)
def test_json_of_the_largest_size(abused: Abused, name: str) -> None:
    """20 MiB that a parser would be busy with for seconds, and everybody with it."""
    request = post("/v1/caption", BODIES[name](), {"Content-Type": "application/json"})

    def attack() -> None:
        for _ in range(2):
            with connected(abused.port) as client:
                client.sendall(request)
                assert read_reply(client)[0] in (400, 413, 422)

    abused.withstands(attack)


FILE = b'Content-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
FIELD = b'Content-Disposition: form-data; name="image"\r\n\r\n'
# Boundary, head of the part, its content.
LARGE_FORMS = {
    "boundaries": (b"B", FILE, b"\r\n--Bx" * (3 * MIB)),
    "hyphens": (b"B", FILE, b"-" * (19 * MIB)),
    "slow_search": (b"a" * 35 + b"b" + b"a" * 34, FILE, b"a" * (19 * MIB)),
    "base64": (b"B", FIELD, b"AAAA" * (19 * MIB // 4)),
}


@pytest.mark.parametrize("name", LARGE_FORMS)
def test_forms_of_the_largest_size(abused: Abused, name: str) -> None:
    """Eight clients that send 20 MiB of what is nearly the end of a part, slow to search, or text of an image."""
    boundary, head, content = LARGE_FORMS[name]
    body = b"--%b\r\n%b%b\r\n--%b--" % (boundary, head, content, boundary)
    request = post("/v1/caption", body, {"Content-Type": f"multipart/form-data; boundary={boundary.decode()}"})

    def client(_: int) -> int:
        with connected(abused.port) as connection:
            connection.sendall(request)
            return read_reply(connection)[0]

    def attack() -> None:
        with ThreadPoolExecutor(8) as clients:
            assert set(clients.map(client, range(8))) <= {400, 422, 429}

    abused.withstands(attack)


def test_uploads_one_byte_short(narrow: Abused) -> None:
    """Twenty bodies of 20 MiB without their last byte hold what bodies may hold together, and not for minutes."""
    body = bytes(20 * MIB - 1)

    def attack() -> None:
        with ExitStack() as exits:
            clients = [exits.enter_context(connected(narrow.port)) for _ in range(20)]
            for client in clients:
                client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (20 * MIB))
                with contextlib.suppress(OSError):
                    client.sendall(body)
            assert narrow.server.metrics()["snapcap_body_memory_bytes"] <= BUDGET
            answers = []
            for client in clients:
                with contextlib.suppress(ConnectionError):
                    answers.append(read_reply(client)[0])
            assert set(answers) <= {408, 429}

    damage = narrow.withstands(attack)
    # Twice: a chunk is joined with those before it, and the allocator keeps some.
    assert damage.window.peak <= damage.before + 2 * BUDGET + 96 * MIB, damage


def test_java_keeps_its_body(abused: Abused) -> None:
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAA"}

    def attack() -> None:
        for picture, caption in abused.samples.items():
            with connected(abused.port) as client:
                client.sendall(post("/v1/caption", picture.read_bytes(), upgrade))
                status, body = read_reply(client)
            assert status == 200
            assert json.loads(body)["caption"] == caption

    abused.withstands(attack)


def test_an_exit_while_nobody_reads(samples: dict[Path, str], compiled_options: tuple[str, ...]) -> None:
    """Three hundred clients that never read a page: the server ends long before its grace period, and quietly."""
    with Abused(samples, *compiled_options, "--grace-period", "120") as abused, ExitStack() as exits:
        for _ in range(300):
            client = exits.enter_context(contextlib.closing(socket.socket()))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.connect(("127.0.0.1", abused.port))
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n" * 30)
        time.sleep(2)
        began = time.monotonic()
        abused.server.process.send_signal(signal.SIGTERM)
        assert abused.server.process.wait(100) == 0
        assert time.monotonic() - began < 60
        assert "Traceback" not in abused.server.log()
