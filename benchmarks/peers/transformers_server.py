"""Serves the plain peer: FastAPI and transformers' `generate`, without any tricks.

    python -m snapcap.benchmarks.peers.transformers_server --model models/demo --port 8100

The model is loaded before the port is bound. The endpoint is a plain `def`, which FastAPI runs in its thread pool.
The request's body is the image itself.
"""

from typing import Any

from snapcap.benchmarks.harness.arguments import make_parser
from snapcap.benchmarks.harness.marks import mark
from snapcap.benchmarks.peers.transformers_model import Captioner


def create_app(captioner: Captioner) -> Any:
    """Returns the application over a loaded model."""
    from fastapi import Body, FastAPI

    app = FastAPI()

    @app.post("/caption")
    def caption(image: bytes = Body(media_type="application/octet-stream")) -> dict[str, Any]:
        return captioner.generate(captioner.pixels([image]))[0]

    return app


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="models/demo", help="checkpoint folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of one operation; 0: torch's default")
    parser.add_argument("--compile", action="store_true", help="torch.compile over encoder and decoder")
    options = parser.parse_args()
    mark("interpreter")
    captioner = Captioner(options.model, options.device, options.compile)
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    app = create_app(captioner)
    import uvicorn

    mark("import_fastapi")
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
