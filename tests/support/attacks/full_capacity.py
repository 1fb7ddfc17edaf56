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
from support.servers.server_process import ServerProcess, wait_until

DEPTH = "snapcap_queue_depth"
IN_FLIGHT = "snapcap_requests_in_flight"
CAPACITY = "snapcap_queue_capacity"


def full_capacity(server: ServerProcess, samples: Mapping[Path, str], patience: float = 60) -> None:
    """Asserts that the server has its full capacity.

    While the device is stopped, exactly `--queue-size` requests wait, a further request is refused, and all waiting
    requests get the right captions afterwards; then the queue is empty. ``patience``: seconds until nothing may be
    in flight any more."""
    places = int(wait_idle(server, patience)[CAPACITY])
    with ExitStack() as exits, stopped(server.engine_pid):
        waiting = ask(server, exits, samples, places)
        server.wait_for(lambda: server.metrics()[DEPTH] == places, 30)
        status, _, fields = server.call("/v1/caption", next(iter(samples)).read_bytes())
        assert status == 429, status
        assert int(fields["retry-after"]) >= 1
        os.kill(server.engine_pid, signal.SIGCONT)
        check(waiting)
    wait_idle(server)


def wait_idle(server: ServerProcess, seconds: float = 60) -> dict[str, float]:
    """Waits until no request is in flight and no place of the queue is taken. Returns the metrics of that moment.

    A server renders its metrics four times a second, so the metrics are read once for each look."""
    metrics: dict[str, float] = {}

    def is_idle() -> bool:
        metrics.update(server.metrics())
        return metrics[DEPTH] == metrics[IN_FLIGHT] == 0

    server.wait_for(is_idle, seconds)
    return metrics


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
    """Stops a process during the block. The block begins when no thread of the process runs any more: on a busy
    machine that is later than the signal."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: all(map(stands_still, Path(f"/proc/{pid}/task").iterdir())))
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def stands_still(thread: Path) -> bool:
    """Returns whether a signal has stopped the thread."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
