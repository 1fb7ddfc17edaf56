"""Serves the peer without torch: FastAPI, uvicorn and ONNX Runtime over models exported ahead of time.

    python -m snapcap.benchmarks.peers.onnx_export --model models/demo --output FOLDER
    python -m snapcap.benchmarks.peers.onnx_server --model FOLDER --port 8102

The models are opened while FastAPI is imported, before the port is bound. Images are decoded in a thread pool.
Decoded images that wait for the model go through it as one batch, of up to eight. With that, and one CPU less for
the model, 16 clients of the demo model got most captions/s on two CPUs (`benchmarks/NOTES.md`).
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from snapcap.benchmarks.harness.arguments import count, make_parser
from snapcap.benchmarks.peers.batcher import Batcher

_BATCH = 8


def create_app(captioner: Any) -> Any:
    """Returns the application over an open captioner."""
    import asyncio

    import numpy as np
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    def run(batch: Sequence[Any]) -> list[list[int]]:
        rows: list[list[int]] = captioner.generate(np.stack(batch))
        return rows

    app = FastAPI()
    batcher = Batcher(run, _BATCH)
    decoders = ThreadPoolExecutor(len(os.sched_getaffinity(0)))

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
    text = "CPU threads of one operation (default: all CPUs but one, which HTTP has)"
    parser.add_argument("--threads", type=count, default=max(len(os.sched_getaffinity(0)) - 1, 1), help=text)
    options = parser.parse_args()
    from snapcap.benchmarks.peers.onnx_captioner import Captioner

    with ThreadPoolExecutor(1) as beside:  # the runtime releases Python's lock while it opens models
        opening = beside.submit(Captioner, options.model, options.threads)
        import fastapi  # noqa: F401
        import uvicorn

        app = create_app(opening.result())
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", ws="none", lifespan="off")


if __name__ == "__main__":
    main()
