"""Pictures that are small to send and dear to decode, against a real server."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from support.attacks.abuse import Abused
from support.attacks.attack_pictures import (
    bmp_in_runs,
    chunk,
    flat_png,
    flat_webp,
    many_scans,
    segment,
    with_chunks,
    with_segments,
)
from support.parity.pictures import encoded, scene

from snapcap.benchmarks.harness.processes import descendants, process_memory
from snapcap.service.images.processes import cpu_seconds
from snapcap.service.images.worker import SLACK

GIB = 1 << 30
PIXELS = (8000, 6000)  # within the limit of 50 million
LOOK_S = 0.02  # a fraction of the time for which a decode holds its memory
KILLED = "snapcap_decode_processes_killed_total"


def caption(abused: Abused, data: bytes, query: str = "") -> tuple[int, str]:
    """Status, and the reason or the code of an error."""
    status, body, _ = abused.server.call(f"/v1/caption{query}", data)
    assert isinstance(body, dict), (status, body)
    return status, body.get("reason") or body.get("code", "")


def at_once(abused: Abused, pictures: list[bytes], query: str = "") -> list[tuple[int, str]]:
    with ThreadPoolExecutor(len(pictures)) as pool:
        return list(pool.map(lambda data: caption(abused, data, query), pictures))


JPEG, PNG = encoded(scene(90, 70), "JPEG"), encoded(scene(90, 70))
FRAME = b"ANMF" + bytes(4)
COMPLEX, LARGE = "too_complex", "too_large"
# What makes a picture, and the reason for which it is refused. Made in the tests: each worker collects all files.
DEAR: dict[str, tuple[Callable[[], bytes], str]] = {
    "scans, of 164 KB": (lambda: many_scans(3000, 2000, 6000), COMPLEX),
    "scans, of 20 MB": (lambda: many_scans(*PIXELS, 190_000), COMPLEX),
    "segments": (lambda: with_segments(JPEG, segment(0xE5, b"") * 4_000_000), COMPLEX),
    "chunks": (lambda: with_chunks(PNG, chunk(b"abCd", b"") * 1_500_000), COMPLEX),
    "chunks of no pixels": (lambda: with_chunks(PNG, chunk(b"IDAT", b"") * 1_500_000), COMPLEX),
    "comments of an animation": (lambda: b"GIF89a\1\0\1\0\0\0\0!\xfe" + b"\1a" * 5_000_000, COMPLEX),
    "runs of a bitmap": (lambda: bmp_in_runs(4000, 4000, b"\1\7"), COMPLEX),
    "screen of an animation": (
        lambda: b"GIF89a\xff\xff\xff\xff\0\0\0," + bytes(4) + b"\xff\xff" * 2 + bytes(50),
        LARGE,
    ),
    "frames": (lambda: flat_webp(20, 20) + FRAME * 2_000_000, COMPLEX),
    "pixels": (lambda: flat_webp(16_000, 16_000), LARGE),
    "a thin one": (lambda: flat_png("RGB", 4, 3_000_000), LARGE),
}


@pytest.mark.parametrize("name", DEAR)
def test_what_is_dear_is_refused_before_it_is_decoded(abused: Abused, name: str) -> None:
    make, reason = DEAR[name]
    data = make()
    abused.withstands(lambda: check_all(at_once(abused, [data] * 4), {(422, reason)}))


def check_all(found: list[tuple[int, str]], allowed: set[tuple[int, str]]) -> None:
    assert set(found) <= allowed, found


def slow_picture() -> bytes:
    """A JPEG of as many pixels and scans as are allowed: a second and more."""
    return many_scans(*PIXELS, 20)


def test_a_decode_ends_with_its_request(abused: Abused) -> None:
    """Its client is answered, and a moment later nothing is done for it any more."""
    slow = slow_picture()
    before = abused.server.metrics()[f'{KILLED}{{reason="deadline"}}']
    late: list[tuple[int, str]] = []

    def attack() -> None:
        late.extend(at_once(abused, [slow] * 6, "?timeout=0.2"))
        pids = abused.server.decode_pids
        end = time.monotonic() + 30
        while any(cpu_grows(pid) for pid in pids):
            assert time.monotonic() < end, "they go on"

    abused.withstands(attack)
    assert set(late) == {(504, "deadline_exceeded")}
    after = abused.server.metrics()
    assert after[f'{KILLED}{{reason="deadline"}}'] > before
    lines = [each for each in abused.server.log().splitlines() if "decode process killed" in each]
    line = next(each for each in lines if 'why="killed at the deadline of its request"' in each)
    assert f"format=jpeg bytes={len(slow)} s=" in line
    assert "request_id=" in line
    assert "decode process ended" not in abused.server.log(), "it is not said that memory ran out"


def cpu_grows(pid: int) -> bool:
    before = cpu_seconds(pid) or 0.0
    time.sleep(0.1)
    return (cpu_seconds(pid) or 0.0) - before > 0.02


def test_an_image_that_takes_too_long_is_refused_for_that(
    samples: dict[Path, str], compiled_options: tuple[str, ...]
) -> None:
    slow = slow_picture()
    with Abused(samples, *compiled_options, "--decode-timeout", "0.05") as abused:
        abused.withstands(lambda: check_all(at_once(abused, [slow] * 3), {(422, "too_complex")}))
        metrics = abused.server.metrics()
        assert metrics[f'{KILLED}{{reason="too_complex"}}'] >= 3
        assert metrics['snapcap_image_decode_failures_total{reason="too_complex"}'] >= 3


@pytest.fixture(scope="module")
def small(samples: dict[Path, str], compiled_options: tuple[str, ...]) -> Iterator[Abused]:
    """With what a container of 4 GiB gives to pixels."""
    size = str(GIB)
    # A machine that has other work decodes the largest pictures for longer than a request may take by default.
    options = ("--decode-memory", size, "--request-timeout", "300", "--decode-timeout", "60")
    with Abused(samples, *compiled_options, *options) as abused:
        yield abused


def test_pixels_stay_within_their_memory(small: Abused) -> None:
    """The dearest of each format that fits, all at once: the decode processes take what the formula says."""
    budget, count = GIB, len(small.server.decode_pids)
    pictures = [
        flat_webp(5600, 5500),
        flat_webp(3900, 3900),
        flat_png("RGBA", 6000, 6000),
        flat_png("I;16", 5000, 5000),
    ]
    too_large = [flat_webp(*PIXELS), flat_webp(16_000, 3_000)]
    found: list[tuple[int, str]] = []
    idle = sum(process_memory(pid) for pid in small.server.decode_pids)
    highest: list[int] = []

    def attack() -> None:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(at_once, small, (pictures + too_large) * 2)
            while not wait([asked], LOOK_S).done:
                highest.append(sum(process_memory(pid) for pid in descendants(small.server.decode_parent_pid)))
            found.extend(asked.result())

    damage = small.withstands(attack)
    assert set(found) <= {(200, ""), (422, "too_large"), (429, "queue_full"), (429, "image_memory_full")}, found
    assert (422, "too_large") in found
    assert (200, "") in found
    assert max(highest) - idle > budget // 4, "it was an attack"
    assert max(highest) - idle <= budget + count * SLACK, (max(highest) >> 20, idle >> 20)
    assert damage.window.peak - damage.before <= budget + count * SLACK + (64 << 20), damage


def test_the_limit_of_a_process_is_under_the_estimate(small: Abused) -> None:
    """What its estimate says is not all that a codec could take: the kernel would refuse it more."""
    share = GIB // 2 // len(small.server.decode_pids)
    for pid in small.server.decode_pids:
        limits: Any = Path(f"/proc/{pid}/limits").read_text().splitlines()
        (line,) = [each for each in limits if each.startswith("Max address space")]
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * 4096
        assert size < int(line.split()[3]) <= size + 2 * share + 2 * SLACK + (20 << 20) * 3
