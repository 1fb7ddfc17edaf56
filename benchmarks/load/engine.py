"""Measures the engine without HTTP, in a process of its own: latency and captions/s of decoded images.

    python -m snapcap.benchmarks.load.engine --model FOLDER --backend aot --cache FOLDER --images FOLDER
        [--concurrency 1,64]

Requests go through the scheduler and the device thread, exactly as in a server. Each worker of a closed loop
submits the next image when it has its caption. The program prints one result line: for each concurrency the
captions/s and the percentiles, and the milliseconds of an encode and of a decode step at every bucket.
"""

import argparse
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from snapcap.benchmarks.harness.arguments import make_parser
from snapcap.benchmarks.harness.marks import mark, memory, result
from snapcap.benchmarks.harness.measurements import percentiles_ms
from snapcap.benchmarks.harness.workload import read_images, start_options
from snapcap.warmup.option import parse_buckets

FOREVER_S = 600.0
STEPS = 20


@dataclass
class Opened:
    """A device thread that serves, or the error that kept it from serving."""

    done: threading.Event = field(default_factory=threading.Event)
    loaded: Any = None
    engine: Any = None
    device: Any = None
    error: Exception | None = None

    def close(self) -> None:
        """Ends the device thread, because the interpreter must not shut down while it runs."""
        self.engine.stop()
        self.device.join()


def open_engine(options: argparse.Namespace) -> Opened:
    """Starts the device thread on a checkpoint, and waits until it is ready.

    Raises:
        RuntimeError: the start failed, or serves another backend than ``options.backend``.
    """
    from snapcap.service.engine.device_thread import DeviceThread
    from snapcap.service.engine.engine import NoObserver
    from snapcap.warmup.progress.status import StartupStatus
    from snapcap.warmup.progress.timeline import Timeline

    start = start_options(
        options.model,
        options.cache,
        device=options.device,
        backend=options.backend,
        buckets=parse_buckets(options.buckets),
        threads=options.threads,
        strict=True,
    )
    opened, status = Opened(), StartupStatus()

    def ready(loaded: Any, engine: Any, _scheduler: Any) -> None:
        opened.loaded, opened.engine = loaded, engine
        status.started()
        opened.done.set()

    def failed(error: Exception) -> None:
        opened.error = error
        opened.done.set()

    opened.device = DeviceThread(start, Timeline.since_exec(), status, NoObserver(), ready, failed)
    opened.device.start()
    opened.done.wait()
    if opened.error is not None:
        raise RuntimeError(f"the engine did not start: {opened.error}") from opened.error
    if status.tier != options.backend:
        raise RuntimeError(f"asked for {options.backend}, got {status.tier}")
    return opened


def closed_loop(submit: Callable[[int], "Future[Any]"], concurrency: int, seconds: float) -> dict[str, float]:
    """Keeps ``concurrency`` requests under way: each completion submits the next request.

    ``submit(turn)`` hands a request to the engine. Returns captions/s, the number of captions and percentiles.

    Raises:
        RuntimeError: a request failed.
    """
    began = time.perf_counter()
    latencies: list[float] = []
    errors: list[BaseException] = []
    left = threading.Semaphore(0)

    def ask(turn: int) -> None:
        asked = time.perf_counter()

        def answered(future: "Future[Any]") -> None:
            now = time.perf_counter()
            error = future.exception()
            if error is not None:
                errors.append(error)
            else:
                latencies.append(now - asked)
            if error is None and now < began + seconds:
                ask(turn + concurrency)
            else:
                left.release()

        submit(turn).add_done_callback(answered)

    for turn in range(concurrency):
        ask(turn)
    for _ in range(concurrency):
        left.acquire()
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed, the first: {errors[0]}")
    rate = len(latencies) / (time.perf_counter() - began)
    return {"captions_per_s": rate, "n": len(latencies), **percentiles_ms(latencies)}


def measure_steps(loaded: Any, images: list[Any]) -> dict[str, dict[str, float]]:
    """Measures an encode, a decode step and a row's move at every bucket, in milliseconds.

    Each is the mean of many in a row, with one wait for the device at the end. The function must run on the device
    thread, between two requests.
    """
    from snapcap.warmup.runtime.slot_request import SlotRequest

    runner = loaded.runner
    found: dict[str, dict[str, float]] = {}
    for bucket in loaded.plan.table.buckets:
        batch = (images * bucket.size)[: bucket.size]

        def encode(bucket: Any = bucket, batch: list[Any] = batch) -> None:
            runner.encode(bucket, batch, 0)

        def step(bucket: Any = bucket) -> None:
            runner.decode_step(bucket)

        def rewind(bucket: Any = bucket) -> None:
            runner.admit(0, [SlotRequest()] * bucket.size)

        found[str(bucket.size)] = {
            "encode_ms": _each(encode, rewind, runner.device.wait),
            "decode_step_ms": _each(step, rewind, runner.device.wait),
        }
        if bucket.size > 1:
            close_gap = partial(runner.move, [(bucket.size - 1, 0)])
            found[str(bucket.size)]["move_ms"] = _each(close_gap, rewind, runner.device.wait)
    return found


def _each(run: Callable[[], None], rewind: Callable[[], None], wait: Callable[[], None]) -> float:
    """Returns the milliseconds of one call: the best of three stretches, after one that does not count.

    A stretch has as many calls as a caption has steps, so no row runs out of its cache.
    """
    best = float("inf")
    for stretch in range(4):
        rewind()
        wait()
        began = time.perf_counter()
        for _ in range(STEPS):
            run()
        wait()
        if stretch:
            best = min(best, (time.perf_counter() - began) / STEPS * 1000)
    return best


def ask(opened: Opened, images: list[Any], turn: int) -> "Future[Any]":
    """Submits an image, another one each turn."""
    from snapcap.service.engine.request import CaptionRequest
    from snapcap.warmup.runtime.slot_request import SamplingParams

    future: Future[Any] = Future()
    deadline = time.monotonic() + FOREVER_S
    pixels = images[turn % len(images)]
    opened.engine.submit(CaptionRequest(str(turn), pixels, (), SamplingParams(), deadline, future))
    return future


def captioned_right(opened: Opened, samples: list[tuple[bytes, str | None]]) -> list[Any]:
    """Captions every image and checks the captions. Returns the images' pixels.

    Raises:
        RuntimeError: a caption is wrong.
    """
    checkpoint = opened.loaded.checkpoint
    images = [checkpoint.transform.decode(data).pixels for data, _ in samples]
    for turn, (_, caption) in enumerate(samples):
        text = checkpoint.tokenizer.decode(ask(opened, images, turn).result().tokens)
        if caption is not None and text != caption:
            raise RuntimeError(f"a wrong caption: {text!r}, expected {caption!r}")
    return images


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--images", type=Path, required=True, help="folder with images and captions.json")
    parser.add_argument("--cache", type=Path, required=True, help="cache folder with the artifact store")
    parser.add_argument("--backend", default="aot")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--buckets", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--concurrency", default="1", help="numbers of workers, such as 1,16,64")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each concurrency")
    options = parser.parse_args()
    with contextlib.closing(open_engine(options)) as opened:
        mark("ready")
        images = captioned_right(opened, read_images(options.images))
        rates = {}
        for concurrency in map(int, options.concurrency.split(",")):
            submit = partial(ask, opened, images)
            closed_loop(submit, concurrency, min(1.0, options.seconds / 2))
            rates[str(concurrency)] = closed_loop(submit, concurrency, options.seconds)
        steps = opened.engine.call(lambda: measure_steps(opened.loaded, images)).result()
        result({"concurrency": rates, "steps": steps, **memory()})


if __name__ == "__main__":
    main()
