"""Checks whether a server has all of its capacity: good captions at once, and every place of its queue."""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from support.servers.raw_http import connected, post, read_reply
from support.servers.server_process import ServerProcess

DEPTH = "snapcap_queue_depth"
IN_FLIGHT = "snapcap_requests_in_flight"
CAPACITY = "snapcap_queue_capacity"


def full_capacity(server: ServerProcess, samples: Mapping[Path, str], patience: float = 60) -> None:
    """Asserts that the server has its full capacity.

    While the device is stopped, exactly `--queue-size` requests wait, a further request is refused, and all waiting
    requests get the right captions afterwards; then the queue is empty. ``patience``: seconds until nothing may be
    in flight any more."""
    wait_idle(server, patience)
    places = int(server.metrics()[CAPACITY])
    with ExitStack() as exits, stopped(server.engine_pid):
        waiting = ask(server, exits, samples, places)
        server.wait_for(lambda: server.metrics()[DEPTH] == places, 30)
        status, _, fields = server.call("/v1/caption", next(iter(samples)).read_bytes())
        assert status == 429, status
        assert int(fields["retry-after"]) >= 1
        os.kill(server.engine_pid, signal.SIGCONT)
        check(waiting)
    wait_idle(server)


def wait_idle(server: ServerProcess, seconds: float = 60) -> None:
    """Until no request is in flight and no place of the queue is taken."""
    server.wait_for(lambda: all(server.metrics()[name] == 0 for name in (DEPTH, IN_FLIGHT)), seconds)


Waiting = list[tuple[socket.socket, str]]


def ask(server: ServerProcess, exits: ExitStack, samples: Mapping[Path, str], count: int) -> Waiting:
    """Send so many requests, each on a connection of its own, with the caption that each must get."""
    pictures = list(samples.items())
    waiting: Waiting = []
    for turn in range(count):
        picture, caption = pictures[turn % len(pictures)]
        client = exits.enter_context(connected(server.port))
        client.sendall(post("/v1/caption", picture.read_bytes()))
        waiting.append((client, caption))
    return waiting


def check(waiting: Waiting) -> None:
    for client, caption in waiting:
        status, body = read_reply(client)
        assert status == 200, body
        assert json.loads(body)["caption"] == caption


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process during the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
