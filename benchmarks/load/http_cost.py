"""Measures the CPU time that a caption costs the server beside the model, by process and thread.

    python -m snapcap.benchmarks.load.http_cost [--form raw] [--clients 64] [--seconds 5] [--rounds 3]
        [--decode-processes 1,2]

The real application behind the real server in this process; the real scheduler and engine in an engine process,
over a runner that only waits: a step is over after a fixed time, however fast the machine's device. Requests and
replies go between the two as they do in a server. Clients are in a process of their own. CPU time of the threads is
what they used, so other work on the machine hardly changes it, as it does latencies and rates.

Where a GPU makes thousands of captions a second, what the HTTP process spends on each is what limits them: its
threads take turns with one interpreter's lock. Images are decoded by processes, as many as are asked for, one
number after the other, each in a server of its own.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

from snapcap.benchmarks.harness.arguments import make_parser
from snapcap.benchmarks.harness.common import scratch
from snapcap.benchmarks.harness.processes import cpu_seconds, tree_cpu_seconds
from snapcap.benchmarks.harness.workload import open_workload
from snapcap.benchmarks.load.http_load import start_clients
from snapcap.benchmarks.load.waiting_engine import IMAGE_SIZE, LIMITS, Words, serve_waiting
from snapcap.benchmarks.report.tables import Report, number
from snapcap.models.processing.transform import ImageTransform
from snapcap.service.api.app import Services, create_app
from snapcap.service.api.bodies.body import BodyLimits
from snapcap.service.config.image_settings import ImageProcessSettings
from snapcap.service.config.settings import Settings
from snapcap.service.engine.remote.client import RemoteEngine
from snapcap.service.engine.remote.loop_channel import LoopChannel
from snapcap.service.engine.remote.messages import Message, Turn
from snapcap.service.images.pool import ProcessImageDecoder
from snapcap.service.images.room import ImageRoom, decode_memory
from snapcap.service.ipc.shared_pixels import Slots
from snapcap.service.server.http_process import assemble
from snapcap.service.server.processes import ServerProcesses, fork_engine, fork_processes
from snapcap.service.server.serve import bind
from snapcap.service.server.uvicorn_server import Server, make_server
from snapcap.service.telemetry import logs
from snapcap.warmup.progress.timeline import Timeline

FORMS = ("raw", "json", "multipart")
NAMES = ("event loop", "HTTP process", "device thread", "engine process", "decode processes")


def assembled() -> Services:
    """A server's parts."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(os.fdopen(os.dup(nowhere.fileno()), "w")):
        logs.configure("text", "info")  # a line a request, as in production
    return assemble(Settings(), Timeline.since_exec())


def attach(services: Services, parts: ServerProcesses) -> tuple[Callable[[], None], Callable[[], None]]:
    """Make them ready to caption; on the event loop. Returns what to call then on another thread, which waits until
    they are, and what ends the other processes."""
    parts.pixels.open(IMAGE_SIZE)
    slots, loop = Slots(parts.pixels.slots), asyncio.get_running_loop()

    def take(message: Message) -> None:
        if isinstance(message, Turn):
            engine.take(message)

    channel = LoopChannel(parts.engine.end, loop, take)
    engine = RemoteEngine(LIMITS, parts.pixels, slots, channel.send, services.metrics)
    room = ImageRoom(decode_memory(Settings()), parts.images.count)
    processes = ProcessImageDecoder(parts.images, parts.pixels, slots, room, 10.0, services.metrics, loop, ended)
    transform, words = ImageTransform(size=IMAGE_SIZE), cast("Any", Words())

    def begin() -> None:
        processes.begin(transform)
        services.captioner.attach(engine, transform, words, "none", processes)
        services.readiness.ready()

    def end() -> None:
        processes.close()
        channel.close()

    return begin, end


def ended(error: Exception) -> None:
    """Without decode processes there is nothing to measure."""
    raise error


def measure(port: int, images: Path, options: argparse.Namespace, clocks: list[Callable[[], float]]) -> list[float]:
    """CPU milliseconds a request by each clock, under one stretch of load."""
    form = () if options.form == "raw" else (f"--{options.form}",)
    with start_clients(port, images, options.clients, options.seconds, *form) as client:
        assert client.stdout is not None
        client.stdout.readline()  # connected
        before = [clock() for clock in clocks]
        counted = json.loads(client.communicate("go\n")[0])
        after = [clock() for clock in clocks]
    answered = len(counted["latencies"])
    if counted["errors"] or counted["wrong"] or not answered:
        raise RuntimeError(f"{counted['errors']} errors {counted['statuses']}, {counted['wrong']} wrong captions")
    return [(end - start) / answered * 1000 for start, end in zip(before, after, strict=True)]


def clock_of(thread: threading.Thread) -> Callable[[], float]:
    """CPU seconds of a thread of this process."""
    assert thread.ident is not None
    return partial(time.clock_gettime, time.pthread_getcpuclockid(thread.ident))


def run(options: argparse.Namespace, images: Path, processes: int) -> list[list[float]]:
    """The rounds, on a thread beside the server, which has this process's main thread, as it has in production."""
    settings = Settings(image_processes=ImageProcessSettings(processes))
    parts = fork_processes(
        settings, Timeline.since_exec(), (), fork_engine(partial(serve_waiting, options.step / 1000))
    )
    engine = parts.engine.pid
    services = assembled()
    clocks: list[Callable[[], float]] = [
        clock_of(threading.main_thread()),
        time.process_time,
        partial(cpu_seconds, engine, engine),
        partial(cpu_seconds, engine),
        partial(tree_cpu_seconds, parts.images.parent.pid),
    ]
    listener = bind("127.0.0.1", 0)
    outcome: list[list[float]] = []
    errors: list[Exception] = []

    def load() -> None:
        try:
            begin, _ = attached[0]
            begin()
            port = listener.getsockname()[1]
            # The first is not counted: connections, caches and threads come to be.
            outcome.extend([measure(port, images, options, clocks) for _ in range(options.rounds + 1)][1:])
        except Exception as error:
            errors.append(error)
        finally:
            server.should_exit = True

    app = create_app(services, BodyLimits(10 << 20, 5.0))
    thread = threading.Thread(target=load)
    attached: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def on_live() -> None:
        attached.append(attach(services, parts))
        thread.start()

    server: Server = make_server(app, Settings().http, services.readiness, on_live)
    server.run(sockets=[listener])
    thread.join()
    services.captioner.close()
    attached[0][1]()
    os.waitpid(engine, 0)
    if errors:
        raise errors[0]
    return outcome


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--form", choices=FORMS, default="raw", help="how the image is sent to /v1/caption")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--decode-processes",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[2],
        metavar="N,N,…",
        help="how many processes decode, each in turn",
    )
    parser.add_argument("--step", type=float, default=0.5, help="milliseconds of the device for a decode step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table and every round")
    options = parser.parse_args()
    with scratch() as folder:
        images = open_workload("demo", folder).write_images(folder / "images")
        captions = dict.fromkeys(json.loads((images / "captions.json").read_text()))
        (images / "captions.json").write_text(json.dumps(captions))
        rounds = [_apart(options, images, processes) for processes in options.decode_processes]
    ways = [f"{count} processes" for count in options.decode_processes]
    medians = [[statistics.median(values) for values in zip(*each, strict=True)] for each in rounds]
    spans = [[f"{min(v):.3f} to {max(v):.3f}" for v in zip(*each, strict=True)] for each in rounds]
    rows = [
        [name, *(cell for m, s in zip(medians, spans, strict=True) for cell in (number(m[row], 3), s[row]))]
        for row, name in enumerate(NAMES)
    ]
    report = Report()
    note = f"{options.form} JPEGs, {options.clients} clients, {options.rounds} rounds of {options.seconds:g} s"
    head = ["of", *(cell for way in ways for cell in (f"{way} decode", "rounds"))]
    report.add("CPU milliseconds a request", head, rows, note)
    report.write(options.json, {"rounds": dict(zip(ways, rounds, strict=True)), "of": NAMES})


def _apart(options: argparse.Namespace, images: Path, processes: int) -> list[list[float]]:
    """As `run`, in a process of its own: what has a thread cannot be forked again."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(run, options, images, processes).result()


if __name__ == "__main__":
    main()
