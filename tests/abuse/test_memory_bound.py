"""The bound of a server's memory, in a container's control group with the limit that deploy/kubernetes ships."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.attacks.abuse import MEMORY_SLACK, Abused
from support.attacks.attack_pictures import flat_png, flat_webp, many_scans
from support.attacks.full_capacity import full_capacity
from support.servers.control_group import PROGRAM, kills, memory_group
from support.servers.raw_http import connected

from snapcap.service.images.worker import SLACK

GIB, MIB = 1 << 30, 1 << 20
LIMIT = 4 * GIB
QUEUE, ROW = 16, 3 * 64 * 64
UPLOADS, UPLOAD = 40, 20 * MIB
HEAD = b"POST /v1/caption HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % UPLOAD
CONNECTION = 1 << 20  # a packet of 256 KiB, 64 KiB of a body, heads, and the buffers of the kernel
# Half a head, which its connection keeps for ten seconds.
HALF_HEAD = b"GET /livez HTTP/1.1\r\nHost: a\r\n" + b"a:b\r\n" * 90 + b"c: " + b"d" * 30_000


@pytest.fixture(scope="module")
def group() -> Iterator[Path]:
    with memory_group(LIMIT) as group:
        yield group


@pytest.fixture(scope="module")
def contained(group: Path, samples: dict[Path, str], compiled_options: tuple[str, ...]) -> Iterator[Abused]:
    """With the limits that a server computes from its container's."""
    abused = Abused(samples, *compiled_options)
    abused.server.program = (*PROGRAM, str(group / "cgroup.procs"))
    with abused:
        yield abused


def uploads(port: int) -> None:
    """All but the last byte of the largest bodies, at once, until they are refused."""
    body = bytes(UPLOAD - 1)
    with ExitStack() as exits:
        clients = [exits.enter_context(connected(port)) for _ in range(UPLOADS)]
        for client in clients:
            with contextlib.suppress(OSError):
                client.sendall(HEAD)
                client.sendall(body)
        for client in clients:
            with contextlib.suppress(OSError):
                client.recv(1)


def heads(port: int, over: threading.Event) -> None:
    with ExitStack() as exits:
        for _ in range(500):
            with contextlib.suppress(OSError):
                exits.enter_context(connected(port)).sendall(HALF_HEAD)
        over.wait(60)


def test_requests_cannot_take_more_memory_than_the_bound(contained: Abused, group: Path) -> None:
    """Heads, bodies and pictures of every dear kind, all at once."""
    bodies, pixels = LIMIT // 16, LIMIT // 4
    metrics = contained.server.metrics()
    assert metrics["snapcap_body_memory_limit_bytes"] == bodies, "it knows its container"
    connections = LIMIT // (4 * MIB)
    processes = len(contained.server.decode_pids)
    grown = bodies + UPLOAD + pixels + processes * SLACK + QUEUE * ROW + connections * CONNECTION
    dear = [
        flat_webp(5600, 5500),
        flat_webp(3900, 3900),
        flat_png("RGBA", 6000, 6000),
        flat_png("I;16", 5000, 5000),
    ]
    dear += [many_scans(8000, 6000, 20), flat_webp(8000, 6000)]

    def attack() -> None:
        over = threading.Event()
        with ThreadPoolExecutor(20) as pool:
            held = pool.submit(heads, contained.port, over)
            sent = pool.submit(uploads, contained.port)
            asked = [pool.submit(contained.server.call, "/v1/caption", data) for data in dear * 3]
            for each in (sent, *asked):
                each.result()
            over.set()
            held.result()

    damage = contained.suffer(attack, slack=MEMORY_SLACK)
    full_capacity(contained.server, contained.samples)
    assert damage.window.peak - damage.before > bodies, "it was an attack"
    assert damage.window.peak <= damage.before + grown, (damage, grown >> 20)
    assert damage.window.peak < LIMIT
    assert damage.after <= damage.before + MEMORY_SLACK, damage
    assert kills(group) == 0
