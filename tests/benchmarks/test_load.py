"""The load generator against a small server: what it counts, and that it does not hide a slow answer."""

import asyncio
import http.server
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from snapcap.benchmarks.harness.load import HttpLoad, Tally, generate
from snapcap.benchmarks.harness.server import Endpoint
from snapcap.benchmarks.harness.workload import read_images

Answer = Callable[[bytes], tuple[int, bytes]]


@contextmanager
def answering(answer: Answer) -> Iterator[int]:
    """A keep-alive server on a free port, a thread for each connection."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            status, body = answer(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def images(tmp_path: Path) -> Path:
    (tmp_path / "a.jpg").write_bytes(b"image a")
    (tmp_path / "b.jpg").write_bytes(b"image b")
    (tmp_path / "captions.json").write_text(json.dumps({"a.jpg": "caption a", "b.jpg": "caption b"}))
    return tmp_path


def load(port: int, images: Path, clients: int, seconds: float, rate: float = 0.0) -> Tally:
    api = Endpoint("/v1/caption", None)
    return asyncio.run(generate(HttpLoad(images, clients, seconds, rate=rate), port, api, 0, lambda: None))


def elapsed(tally: Tally) -> float:
    return tally.last - tally.began


def right(body: bytes) -> tuple[int, bytes]:
    return 200, b'{"caption": "%s"}' % body.replace(b"image", b"caption")


def test_right_captions_are_counted_with_their_latencies(images: Path) -> None:
    with answering(right) as port:
        result = load(port, images, 3, 0.5)
    assert (result.wrong, result.errors) == (0, 0)
    assert len(result.latencies) >= 3
    assert all(0 < latency <= elapsed(result) for latency in result.latencies)
    assert elapsed(result) > 0.4


def test_a_reply_that_comes_after_the_time_is_counted_with_the_time_it_took(images: Path) -> None:
    def slowly(body: bytes) -> tuple[int, bytes]:
        time.sleep(0.6)
        return right(body)

    with answering(slowly) as port:
        result = load(port, images, 2, 0.2)
    assert len(result.latencies) == 2
    assert elapsed(result) >= max(result.latencies) > 0.6


def test_what_has_no_reply_at_the_end_costs_no_other_reply(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapcap.benchmarks.harness.load.GRACE_S", 0.1)
    turns, released = itertools.count(), threading.Event()

    def first_only(body: bytes) -> tuple[int, bytes]:
        if next(turns):
            released.wait(30)
        return right(body)

    with answering(first_only) as port:
        result = load(port, images, 2, 3.0)
        released.set()
    assert (len(result.latencies), result.errors, result.unanswered) == (1, 0, 2)
    assert 0 < elapsed(result) < 3.0


def test_wrong_captions_are_counted(images: Path) -> None:
    with answering(lambda body: (200, b'{"caption": "caption b"}')) as port:
        result = load(port, images, 1, 0.3)
    assert abs(2 * result.wrong - len(result.latencies)) <= 2


def test_refusals_are_errors_and_no_captions(images: Path) -> None:
    with answering(lambda body: (503, b"{}")) as port:
        result = load(port, images, 2, 0.2)
    assert result.latencies == []
    assert result.errors > 0


def test_an_open_loop_asks_at_its_rate_and_counts_from_the_due_moment(images: Path) -> None:
    """One request at a time, 50 ms each, asked for 40 times a second: a closed loop would see 50 ms for ever."""
    turn = threading.Lock()

    def slowly(body: bytes) -> tuple[int, bytes]:
        with turn:
            time.sleep(0.05)
        return right(body)

    with answering(slowly) as port:
        result = load(port, images, 2, 1.0, rate=40)
    assert 20 < len(result.latencies) < 70
    assert max(result.latencies) > 0.3


def test_images_are_read_as_they_were_written(images: Path) -> None:
    assert read_images(images) == [(b"image a", "caption a"), (b"image b", "caption b")]
