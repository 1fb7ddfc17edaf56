"""What clients can do to the engine behind the server: leave, never read, ask for as much as they may."""

import base64
import json
import socket
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from support.attacks.abuse import Abused

CLIENTS = 16
# As fast as captions are served: this is not about how many connections a loop can accept at once.
PAUSE_S = 0.1


def head(path: str, length: int, kind: str = "image/png") -> bytes:
    lines = f"POST {path} HTTP/1.1", "Host: a", f"Content-Type: {kind}", f"Content-Length: {length}"
    return "\r\n".join((*lines, "", "")).encode()


def connect(abused: Abused) -> socket.socket:
    return socket.create_connection(("127.0.0.1", abused.port), timeout=30)


def at_once(work: Callable[[int], object], count: int) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(work, range(count)))


def image_of(abused: Abused) -> bytes:
    return next(iter(abused.samples)).read_bytes()


def test_a_flood_of_clients_that_leave_as_soon_as_they_have_asked(abused: Abused) -> None:
    data = image_of(abused)

    def ask_and_leave(number: int) -> None:
        query = ("", "?num_beams=4", "?max_new_tokens=40&temperature=1")[number % 3]
        with connect(abused) as client:
            client.sendall(head(f"/v1/caption{query}", len(data)) + data)
            time.sleep(PAUSE_S)

    abused.withstands(lambda: at_once(ask_and_leave, 600))
    metrics = abused.server.metrics()
    assert metrics["snapcap_queue_depth"] == metrics["snapcap_requests_in_flight"] == 0
    assert metrics["snapcap_engine_progress_age_seconds"] < 5


def test_streams_that_nobody_reads_hold_no_slot(abused: Abused) -> None:
    url = "data:image/png;base64," + base64.b64encode(image_of(abused)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    asked = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": content}]}
    body = json.dumps(asked).encode()
    request = head("/v1/chat/completions", len(body), "application/json") + body

    def open_and_wait() -> None:
        with ExitStack() as exits:
            for _ in range(50):  # three times as many as may wait
                client = exits.enter_context(connect(abused))
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                client.sendall(request)
                time.sleep(PAUSE_S)
            abused.server.wait_for(lambda: abused.server.metrics()["snapcap_requests_in_flight"] == 0, seconds=60)
            abused.server.caption(next(iter(abused.samples)))

    abused.withstands(open_and_wait)


def test_the_largest_requests_there_are_are_served_beside_the_smallest(abused: Abused) -> None:
    data = image_of(abused)
    statuses: list[int] = []

    def ask(number: int) -> None:
        query = ("?num_beams=4&max_new_tokens=30", "?max_new_tokens=1", "?num_beams=3&length_penalty=9")[number % 3]
        statuses.append(abused.server.call(f"/v1/caption{query}", data)[0])

    abused.withstands(lambda: at_once(ask, 120))
    assert set(statuses) <= {200, 429}
    assert 200 in statuses


def test_more_than_the_caches_hold_is_refused_whatever_number_it_is(abused: Abused) -> None:
    data = image_of(abused)
    for query in ("max_new_tokens=64", "max_new_tokens=99999999999999999999", "num_beams=5", "num_beams=1000000"):
        status, body, _ = abused.server.call(f"/v1/caption?{query}", data)
        assert (status, body["code"]) == (422, "invalid_option"), query
    url = f"http://127.0.0.1:{abused.port}/readyz"
    with urllib.request.urlopen(url) as reply:
        assert reply.status == 200
