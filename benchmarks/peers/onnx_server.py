"""Serves the peer without torch: FastAPI, uvicorn and ONNX Runtime over models exported ahead of time.

    python -m snapcap.benchmarks.peers.onnx_export models/demo FOLDER float32
    python -m snapcap.benchmarks.peers.onnx_server --model FOLDER --port 8102 --batch 8

The models are opened while FastAPI is imported, before the port is bound. Images are decoded in a thread pool.
Decoded images that wait for the model go through it as one batch. With up to eight in a batch, and one CPU less for
the model, 16 clients of the demo model got most captions/s on two CPUs (`benchmarks/NOTES.md`).
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from snapcap.benchmarks.harness.arguments import count, make_server_parser
from snapcap.benchmarks.peers.transformers_server import create_app, decode

ENCODER, DECODER, TOKENIZER = "encoder.onnx", "decoder.onnx", "tokenizer.json"
DESCRIPTION = "captioner.json"
Pixels = NDArray[np.float32]


@dataclass(frozen=True)
class Description:
    """The facts about an export beside its two models.

    resample: Pillow's number of the filter.
    scale, shift: numbers of each channel, which rescale and normalise a pixel by one product and one sum.
    ends: the tokens that end a caption. There may be none.
    limit: greatest number of tokens after the start token.
    """

    height: int
    width: int
    resample: int
    scale: list[float]
    shift: list[float]
    layers: int
    heads: int
    head_size: int
    start: int
    ends: list[int]
    limit: int

    @property
    def cache_names(self) -> list[str]:
        """Names of the keys and values of each layer, in the order of the decoder's inputs."""
        return [f"{what}_{layer}" for layer in range(self.layers) for what in ("key", "value")]


class Captioner:
    """Opens an export. Threads may share it."""

    def __init__(self, folder: Path, threads: int) -> None:
        """``threads`` is the number of threads of one operation."""
        about = self.description = Description(**json.loads((folder / DESCRIPTION).read_text()))
        self._encoder = _open(folder / ENCODER, threads)
        self._decoder = _open(folder / DECODER, threads)
        self._tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER))
        self._scale, self._shift = np.array(about.scale, np.float32), np.array(about.shift, np.float32)
        self._cross = [f"cross_{name}" for name in about.cache_names]
        self._past = [f"past_{name}" for name in about.cache_names]
        self._next = ["next", *(f"present_{name}" for name in about.cache_names)]

    def pixels(self, image: bytes) -> Pixels:
        """Returns an encoded image as [3, H, W], normalised as by transformers' processor."""
        about = self.description
        picture = decode(image).resize((about.width, about.height), Image.Resampling(about.resample))
        values = np.asarray(picture, np.float32) * self._scale + self._shift
        return np.ascontiguousarray(values.transpose(2, 0, 1))

    def generate(self, pixels: Pixels) -> list[list[int]]:
        """Returns the tokens of each image of a batch [B, 3, H, W], without the end token. Only tokens leave the
        runtime."""
        about, count = self.description, len(pixels)
        cross = self._encoder.run_with_ort_values(self._cross, {"pixels": _value(pixels)})
        empty = _value(np.zeros((count, about.heads, 0, about.head_size), np.float32))
        inputs = {"tokens": _value(np.full((count, 1), about.start, np.int64)), **dict.fromkeys(self._past, empty)}
        inputs |= zip(self._cross, cross, strict=True)
        rows: list[list[int]] = [[] for _ in pixels]
        going = set(range(count))
        for _ in range(about.limit):
            tokens, *present = self._decoder.run_with_ort_values(self._next, inputs)
            inputs |= zip(["tokens", *self._past], [tokens, *present], strict=True)
            chosen = tokens.numpy()[:, 0].tolist()
            for row in list(going):
                if chosen[row] in about.ends:
                    going.remove(row)
                else:
                    rows[row].append(chosen[row])
            if not going:
                break
        return rows

    def captions(self, batch: Sequence[Pixels]) -> list[dict[str, Any]]:
        """Returns the captions of images, with their numbers of tokens."""
        rows = self.generate(np.stack(batch))
        texts = self._tokenizer.decode_batch(rows, skip_special_tokens=True)
        return [{"caption": text.strip(), "tokens": len(row)} for text, row in zip(texts, rows, strict=True)]


def _open(model: Path, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # The export was optimised ahead of time.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _value(array: NDArray[Any]) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def main() -> None:
    parser = make_server_parser(__doc__, port=8102)
    text = "CPU threads of one operation (default: all CPUs but one, which HTTP has)"
    parser.add_argument("--threads", type=count, default=max(len(os.sched_getaffinity(0)) - 1, 1), help=text)
    options = parser.parse_args()
    with ThreadPoolExecutor(1) as beside:  # the runtime releases Python's lock while it opens models
        opening = beside.submit(Captioner, Path(options.model), options.threads)
        import fastapi  # noqa: F401
        import uvicorn

        captioner = opening.result()
        app = create_app(captioner.pixels, captioner.captions, options.batch)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", ws="none", lifespan="off")


if __name__ == "__main__":
    main()
