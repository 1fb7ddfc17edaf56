"""Serves the peer with dynamic batching: LitServe and transformers' `generate`.

    python -m snapcap.benchmarks.peers.litserve_server --model models/demo --port 8101 --batch 16

Images wait at most 5 ms for each other. LitServe takes JSON or forms, so an image comes as base64, as in LitServe's
own examples.
"""

import base64
import json
from typing import Any

import litserve  # type: ignore[import-not-found, unused-ignore]  # measured where it is installed
from fastapi import Response

from snapcap.benchmarks.harness.arguments import make_server_parser
from snapcap.benchmarks.peers.transformers_server import Captioner, decode

BATCH_TIMEOUT_S = 0.005


class CaptionApi(litserve.LitAPI):  # type: ignore[misc, unused-ignore]  # LitServe has no types where it is installed
    """Runs in LitServe's only worker process."""

    def __init__(self, folder: str, model_device: str, **options: Any) -> None:
        super().__init__(**options)
        self._folder = folder
        self._model_device = model_device

    def setup(self, device: str) -> None:
        """Opens the model. LitServe calls this function once in the worker."""
        self._captioner = Captioner(self._folder, self._model_device)

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # LitServe would take an annotation for a form
        return decode(base64.b64decode(request["image"]))

    def predict(self, pictures: list[Any]) -> list[dict[str, Any]]:
        return self._captioner.captions(pictures)

    def encode_response(self, output: dict[str, Any]) -> Response:
        return Response(json.dumps(output), media_type="application/json")


def main() -> None:
    options = make_server_parser(__doc__, port=8101).parse_args()
    api = CaptionApi(
        options.model,
        options.device,
        max_batch_size=options.batch or 1,
        batch_timeout=BATCH_TIMEOUT_S,
        api_path="/caption",
    )
    # LitServe would refuse a request after 30 s, which a model of real size may need on a CPU.
    server = litserve.LitServer(api, accelerator=options.device, devices=1, workers_per_device=1, timeout=False)
    server.run(host="127.0.0.1", port=options.port, log_level="warning", generate_client_file=False)


if __name__ == "__main__":
    main()
