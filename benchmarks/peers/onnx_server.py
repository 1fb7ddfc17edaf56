"""Serves the peer without torch: FastAPI, uvicorn and ONNX Runtime over models exported ahead of time.

    python -m snapcap.benchmarks.peers.onnx_export --model models/demo --output FOLDER
    python -m snapcap.benchmarks.peers.onnx_server --model FOLDER --port 8102

The models are opened while FastAPI is imported, before the port is bound. Images are decoded in a thread pool.
Decoded images that wait for the model go through it as one batch. The defaults gave 16 clients of the demo model
most captions/s on two CPUs (`benchmarks/README.md`): all CPUs but one for the model, and one for HTTP.
"""

import argparse
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from snapcap.benchmarks.harness.arguments import count, make_parser
from snapcap.benchmarks.harness.marks import mark

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batcher(Generic[Item, Answer]):
    """Runs batches one after the other in each of its threads."""

    def __init__(self, run: Callable[[Sequence[Item]], Sequence[Answer]], most: int, workers: int) -> None:
        """``run`` returns as many answers as it gets items. ``most`` is the greatest number of items in a batch."""
        self._run = run
        self._most = most
        self._waiting: SimpleQueue[tuple[Item, Future[Answer]]] = SimpleQueue()
        for _ in range(workers):
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, item: Item) -> "Future[Answer]":
        answer: Future[Answer] = Future()
        self._waiting.put((item, answer))
        return answer

    def _work(self) -> None:
        while True:
            batch = self._next_batch()
            try:
                answers = self._run([item for item, _ in batch])
            except Exception as error:  # an error of the requests, which must not end this thread
                for _, future in batch:
                    future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                future.set_result(answer)

    def _next_batch(self) -> "list[tuple[Item, Future[Answer]]]":
        batch = [self._waiting.get()]
        while len(batch) < self._most:
            try:
                batch.append(self._waiting.get_nowait())
            except Empty:
                break
        # A request that was cancelled is not run.
        running = [each for each in batch if each[1].set_running_or_notify_cancel()]
        return running or self._next_batch()


def create_app(captioner: Any, options: argparse.Namespace) -> Any:
    """Returns the application over an open captioner."""
    import asyncio

    import numpy as np
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    from snapcap.benchmarks.peers.onnx_server import Batcher

    def run(batch: Sequence[Any]) -> list[list[int]]:
        rows: list[list[int]] = captioner.generate(np.stack(batch))
        return rows

    app = FastAPI()
    batcher = Batcher(run, options.batch, options.workers)
    decoders = ThreadPoolExecutor(options.image_threads)

    @app.post("/caption")
    async def caption(request: Request) -> JSONResponse:
        image = await request.body()
        pixels = await asyncio.get_running_loop().run_in_executor(decoders, captioner.pixels, image)
        tokens = await asyncio.wrap_future(batcher.submit(pixels))
        return JSONResponse({"caption": captioner.text(tokens), "tokens": len(tokens)})

    return app


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the export")
    parser.add_argument("--device", choices=("cpu",), default="cpu")
    parser.add_argument("--port", type=int, default=8102)
    cpus = len(os.sched_getaffinity(0))
    text = "CPU threads of one operation (default: all CPUs but one)"
    parser.add_argument("--threads", type=count, default=max(cpus - 1, 1), help=text)
    parser.add_argument(
        "--workers", type=count, default=1, help="number of batches at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=count, default=8, help="greatest number of images in a batch (default: %(default)s)"
    )
    text = "number of threads that decode images (default: number of CPUs)"
    parser.add_argument("--image-threads", type=count, default=cpus, help=text)
    options = parser.parse_args()
    mark("interpreter")
    from snapcap.benchmarks.peers.onnx_captioner import Captioner

    mark("import_onnxruntime")
    with ThreadPoolExecutor(1) as beside:  # the runtime releases Python's lock while it opens models
        opening = beside.submit(Captioner, options.model, options.threads)
        import fastapi  # noqa: F401
        import uvicorn

        mark("import_fastapi")
        app = create_app(opening.result(), options)
    mark("load_model")
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", ws="none", lifespan="off")


if __name__ == "__main__":
    main()
