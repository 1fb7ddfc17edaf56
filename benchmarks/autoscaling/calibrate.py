"""Measures what a server's processes cost a request, for the simulation of one: CPU time, not how long it took.

How long a step takes is no use on a machine with other programs; the CPU time of each process is, and so is how the
costs of the buckets compare, which the engine alone says in a process of its own.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapcap.benchmarks.autoscaling.engine_model import ServerCosts
from snapcap.benchmarks.harness.common import DEMO, run_child
from snapcap.benchmarks.harness.marks import read_result
from snapcap.benchmarks.harness.processes import cpu_seconds, own_parts
from snapcap.benchmarks.harness.server import Server
from snapcap.benchmarks.harness.workload import read_images
from snapcap.warmup.machine.cpus import available_cpus

COMPONENTS = ("encoder", "decoder")
_LOOK_S = 0.2


@dataclass(frozen=True)
class Buckets:
    """Seconds of an encode and of a decode step by bucket, with no other work of ours beside them."""

    encode: dict[int, float]
    step: dict[int, float]

    def seconds(self, counts: dict[tuple[str, int], float]) -> float:
        """Of so many encodes and steps, by component and bucket."""
        costs = {"encoder": self.encode, "decoder": self.step}
        return sum(number * costs[component][bucket] for (component, bucket), number in counts.items())


def measure_buckets(cache: Path, images: Path) -> Buckets:
    """By `benchmarks.load.engine`, in a process of its own."""
    command = [sys.executable, "-m", "snapcap.benchmarks.load.engine", "--model", str(DEMO), "--backend", "aot"]
    further = ["--cache", str(cache), "--images", str(images), "--device", "cpu", "--concurrency", "1"]
    steps = read_result(run_child([*command, *further, "--seconds", "1"], "the engine"))["steps"]
    return Buckets(
        {int(size): each["encode_ms"] / 1000 for size, each in steps.items()},
        {int(size): each["decode_step_ms"] / 1000 for size, each in steps.items()},
    )


@dataclass(frozen=True)
class Usage:
    """CPU seconds of the HTTP process, of the engine process and of those that decode images, what the engine has
    run, by component and bucket."""

    http: float
    engine: float
    images: float
    counts: dict[tuple[str, int], float]
    at: float

    @classmethod
    def now(cls, server: Server, sizes: Iterable[int]) -> "Usage":
        """``sizes``: the buckets."""
        engine, *decoders = own_parts(server.pid)
        metrics = server.metrics()
        counts = {
            (component, size): value
            for component in COMPONENTS
            for size in sizes
            if (value := metrics.get(_counter(component, size)))
        }
        images = sum(map(cpu_seconds, decoders))
        return cls(cpu_seconds(server.pid), cpu_seconds(engine), images, counts, time.monotonic())

    def since(self, before: "Usage") -> "Usage":
        counts = {key: value - before.counts.get(key, 0.0) for key, value in self.counts.items()}
        return Usage(
            self.http - before.http,
            self.engine - before.engine,
            self.images - before.images,
            {key: value for key, value in counts.items() if value},
            self.at - before.at,
        )


def _counter(component: str, size: int) -> str:
    return f'snapcap_step_duration_seconds_count{{bucket="{size}",component="{component}"}}'


class OtherThreads:
    """Counts, while it is entered, the threads of other programs that have work, nice ones less; ``mean`` then."""

    def __init__(self, own: Iterable[int]) -> None:
        """``own``: processes whose threads are none of them, besides this one's."""
        self._own = {os.getpid(), *own}
        self._seen: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "OtherThreads":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def mean(self) -> float:
        return sum(self._seen) / max(len(self._seen), 1)

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._seen.append(sum(map(weight, _other_threads(self._own))))


def _other_threads(own: set[int]) -> Iterator[list[str]]:
    """Of each thread of other processes, the fields of its stat after the program's name (proc(5))."""
    for process in os.listdir("/proc"):
        if process.isdigit() and int(process) not in own:
            for file in Path(f"/proc/{process}/task").glob("*/stat"):
                with contextlib.suppress(OSError):
                    yield file.read_text().rpartition(")")[2].split()


def weight(fields: list[str]) -> float:
    """What a thread counts beside one of ours: nothing where it has no work, and less by a fifth for each step that
    it is nicer, as the kernel has it."""
    return 1.25 ** -int(fields[16]) if fields[0] == "R" else 0.0


def costs_of(used: Usage, requests: int, client: float, buckets: Buckets) -> ServerCosts:
    """``used`` and ``client`` (CPU seconds of the load generator): of so many requests.

    The engine's CPU time is that of its encodes and steps, by how the buckets compare, as nothing else is in it
    but what a turn costs besides: so that is in proportion, too."""
    scale = used.engine / buckets.seconds(used.counts)
    cpus = available_cpus()
    return ServerCosts(
        encode={size: scale * seconds for size, seconds in buckets.encode.items()},
        step={size: scale * seconds for size, seconds in buckets.step.items()},
        turn=0.0,
        http=used.http / requests,
        image=used.images / requests,
        client=client / requests,
        hand_over=0.0,
        cpus=cpus,
        decoders=min(cpus, 4),
    )


def decode_steps(server: Server, images: Path) -> list[int]:
    """Of each image's caption, in the order of the load generator: its tokens, and the one that ends it."""
    connection = server.connect()
    try:
        replies: list[dict[str, Any]] = [
            server.caption(connection, image).json() for image, _ in read_images(images)
        ]
    finally:
        connection.close()
    return [reply["tokens"] + (reply["finish_reason"] == "stop") for reply in replies]
