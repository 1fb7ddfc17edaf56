"""`--queue-size` of a real server is what its help says, whichever of its processes stands still."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.attacks.full_capacity import ask, check, stopped, wait_idle
from support.servers.raw_http import connected, post, read_reply
from support.servers.server_process import ServerProcess

PLACES = 3
DEPTH = "snapcap_queue_depth"
REFUSED = 'snapcap_requests_rejected_total{reason="queue_full"}'


@pytest.fixture(scope="module")
def server(compiled_options: tuple[str, ...]) -> Iterator[ServerProcess]:
    with ServerProcess(*compiled_options, "--queue-size", str(PLACES), "--decode-processes", "1") as process:
        yield process.wait_ready()


@pytest.mark.parametrize("which", ["engine", "decoder"])
def test_so_many_wait_and_one_more_is_refused_before_its_body(
    server: ServerProcess, samples: dict[Path, str], which: str
) -> None:
    pid = server.engine_pid if which == "engine" else server.decode_pids[0]
    refused = server.metrics()[REFUSED]
    with ExitStack() as exits:
        with stopped(pid):
            waiting = ask(server, exits, samples, PLACES)
            server.wait_for(lambda: server.metrics()[DEPTH] == PLACES, 30)
            for _ in range(2):
                client = exits.enter_context(connected(server.port))
                client.sendall(post("/v1/caption", b"half of it", {"Content-Length": "20"}))
                status, body = read_reply(client)
                assert (status, json.loads(body)["code"]) == (429, "queue_full")
            assert server.metrics()[DEPTH] == PLACES
        check(waiting)
    wait_idle(server)
    assert server.metrics()[REFUSED] == refused + 2
    server.wait_for(lambda: "status=429" in server.log())
    assert "code=queue_full" in next(line for line in server.log().splitlines() if "status=429" in line)


def test_bodies_that_are_sent_slowly_keep_nobody_out(server: ServerProcess, samples: dict[Path, str]) -> None:
    with ExitStack() as exits:
        for _ in range(PLACES * 10):
            client = exits.enter_context(connected(server.port))
            client.sendall(post("/v1/caption", b"half of it", {"Content-Length": "20"}))
        server.wait_for(lambda: server.metrics()["snapcap_requests_in_flight"] == PLACES * 10, 30)
        server.caption(next(iter(samples)))
        assert server.metrics()[DEPTH] == 0
    wait_idle(server)


def test_a_decode_process_that_is_killed_takes_no_place_along(
    server: ServerProcess, samples: dict[Path, str]
) -> None:
    with ExitStack() as exits:
        (pid,) = server.decode_pids
        os.kill(pid, signal.SIGSTOP)
        waiting = ask(server, exits, samples, PLACES)
        server.wait_for(lambda: server.metrics()[DEPTH] == PLACES, 30)
        os.kill(pid, signal.SIGKILL)
        check(waiting)
    wait_idle(server)
