"""Measures the engine without HTTP, in a process of its own: latency and captions/s of decoded images.

    python -m snapcap.benchmarks.engine --images FOLDER [--concurrency 1,64] [--seconds 5] --model FOLDER …

All other options are those of `snapcap serve`. Requests go through the scheduler and the device thread,
exactly as in a server. Each worker of a closed loop submits the next image when it has its caption. The program
prints one result line: for each concurrency the captions/s and the percentiles, and the milliseconds of an encode
and of a decode step at every bucket.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from snapcap.benchmarks.harness.arguments import counts, make_parser
from snapcap.benchmarks.harness.marks import memory, result, series_ms
from snapcap.benchmarks.harness.report import percentiles_ms
from snapcap.benchmarks.harness.workload import read_images
from snapcap.service.config.reader import add_arguments, read_settings
from snapcap.service.config.settings import GROUPS
from snapcap.service.offline.feed import Model, OfflineModel

FOREVER_S = 600.0


class OpenedModel(OfflineModel):
    """A warm model. ``loaded`` has its runner."""

    loaded: Any = None

    def _ready(self, loaded: Any, *others: Any) -> None:
        self.loaded = loaded
        super()._ready(loaded, *others)

    def wait_for_buckets(self) -> None:
        """Waits until each bucket is ready, or given up."""
        while any(bucket.state == "pending" for bucket in self._status.buckets()):
            time.sleep(0.05)


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
    """Measures an encode, a decode step and a row's move at every bucket that is ready, in milliseconds.

    Each is the mean of many in a row, with one wait for the device at the end. The function must run on the device
    thread, between two requests.
    """
    from snapcap.warmup.runtime.slot_request import SlotRequest

    runner = loaded.runner
    found: dict[str, dict[str, float]] = {}
    for bucket in loaded.plan.step_table.buckets:
        if not runner.is_bound("decoder", bucket):
            continue
        batch = (images * bucket.size)[: bucket.size]
        rewind = partial(runner.admit, 0, [SlotRequest()] * bucket.size)
        timed = partial(series_ms, rewind=rewind, wait=runner.device.wait)
        steps = found[str(bucket.size)] = {"decode_step_ms": timed(partial(runner.decode_step, bucket))}
        if runner.is_bound("encoder", bucket):
            steps["encode_ms"] = timed(partial(runner.encode, bucket, batch, 0))
        if bucket.size > 1:
            steps["move_ms"] = timed(partial(runner.move, [(bucket.size - 1, 0)]))
    return found


def ask(model: Model, images: list[Any], turn: int) -> "Future[Any]":
    """Submits an image, another one each turn."""
    from snapcap.service.engine.request import CaptionRequest
    from snapcap.warmup.runtime.slot_request import SamplingParams

    future: Future[Any] = Future()
    pixels, deadline = images[turn % len(images)], time.monotonic() + FOREVER_S
    model.engine.submit(CaptionRequest(str(turn), pixels, (), SamplingParams(), deadline, future))
    return future


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--images", type=Path, required=True, help="folder with images and captions.json")
    parser.add_argument("--concurrency", type=counts, default=[1], help="numbers of workers, such as 1,16,64")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each concurrency")
    options, serve = parser.parse_known_args()
    of_servers = make_parser(None)
    add_arguments(of_servers, GROUPS)
    settings = read_settings(of_servers.parse_args(serve), os.environ)
    with contextlib.closing(OpenedModel(settings)) as opened:
        model = opened.start()
        if model is None or model.backend != settings.compute.backend:
            raise RuntimeError(f"the engine did not start on {settings.compute.backend}: {opened.error or model}")
        samples = read_images(options.images)
        images = [model.checkpoint.transform.decode(data).pixels for data, _ in samples]
        for turn, (_, caption) in enumerate(samples):
            text = model.checkpoint.tokenizer.decode(ask(model, images, turn).result().tokens)
            if caption is not None and text != caption:
                raise RuntimeError(f"a wrong caption: {text!r}, expected {caption!r}")
        opened.wait_for_buckets()
        rates, submit = {}, partial(ask, model, images)
        for concurrency in options.concurrency:
            closed_loop(submit, concurrency, min(1.0, options.seconds / 2))
            rates[str(concurrency)] = closed_loop(submit, concurrency, options.seconds)
        steps = model.engine.call(lambda: measure_steps(opened.loaded, images)).result()
        result({"concurrency": rates, "steps": steps, **memory()})


if __name__ == "__main__":
    main()
