"""The peer: FastAPI and transformers' `generate`, as one writes it who knows both and has no tricks up his sleeve.

    python -m benchmarks.peers.transformers_server --model models/demo --port 8100

The model is loaded before the port is bound, the endpoint is a plain `def`, which FastAPI runs in its thread pool,
and the body is the image itself.
"""

import argparse
import io
from typing import Any

import torch
import uvicorn
from fastapi import Body, FastAPI
from PIL import Image
from transformers import AutoTokenizer, VisionEncoderDecoderModel, ViTImageProcessorPil


def create_app(folder: str) -> FastAPI:
    """The application over the checkpoint of a folder, loaded here."""
    processor: Any = ViTImageProcessorPil.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = VisionEncoderDecoderModel.from_pretrained(folder)
    model.eval()
    app = FastAPI()

    @app.post("/caption")
    def caption(image: bytes = Body(media_type="application/octet-stream")) -> dict[str, str]:
        pixels = processor(Image.open(io.BytesIO(image)).convert("RGB"), return_tensors="pt").pixel_values
        with torch.inference_mode():
            tokens = model.generate(pixels, do_sample=False, num_beams=1)
        return {"caption": tokenizer.decode(tokens[0], skip_special_tokens=True).strip()}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/demo", help="checkpoint folder")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of one operation; 0: torch's choice")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    uvicorn.run(create_app(options.model), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
