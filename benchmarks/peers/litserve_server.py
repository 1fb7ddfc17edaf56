"""Serves the peer with dynamic batching: LitServe and transformers' `generate`.

    python -m snapcap.benchmarks.peers.litserve_server --model models/demo --port 8101

Up to 64 images in one call of `generate`, which wait for each other 5 ms at most. LitServe takes JSON or forms, so
the image comes as base64, as in its own examples.
"""

import base64
import json
from typing import Any

import litserve
from fastapi import Response

from snapcap.benchmarks.harness.arguments import make_parser
from snapcap.benchmarks.harness.marks import mark
from snapcap.benchmarks.peers.transformers_model import Captioner

BATCH_TIMEOUT_S = 0.005


class CaptionApi(litserve.LitAPI):  # type: ignore[misc, unused-ignore]  # untyped, where it is installed
    """Runs in LitServe's worker process; one for one model."""

    def __init__(self, folder: str, model_device: str, **options: Any) -> None:
        super().__init__(**options)
        self._folder = folder
        self._model_device = model_device

    def setup(self, device: str) -> None:
        """Called once in the worker."""
        self._captioner = Captioner(self._folder, self._model_device, compiled=False)

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # it takes an annotation for a form
        return base64.b64decode(request["image"])

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        return inputs

    def predict(self, images: list[bytes]) -> list[dict[str, Any]]:
        return self._captioner.generate(self._captioner.pixels(images))

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return output

    def encode_response(self, output: dict[str, Any]) -> Response:
        return Response(json.dumps(output), media_type="application/json")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="models/demo", help="checkpoint folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--port", type=int, default=8101)
    parser.add_argument("--batch", type=int, default=64, help="images in one call at most")
    options = parser.parse_args()
    mark("import_litserve")
    api = CaptionApi(
        options.model,
        options.device,
        max_batch_size=options.batch,
        batch_timeout=BATCH_TIMEOUT_S,
        api_path="/caption",
    )
    server = litserve.LitServer(api, accelerator=options.device, devices=1, workers_per_device=1)
    server.run(host="127.0.0.1", port=options.port, log_level="warning", generate_client_file=False)


if __name__ == "__main__":
    main()
