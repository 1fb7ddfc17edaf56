"""Serves the plain peer: FastAPI and transformers' `generate`, one image at a time or in batches.

    python -m snapcap.benchmarks.peers.transformers_server --model models/demo --port 8100 [--batch 16]

The model is loaded before the port is bound. A request's body is the image itself. Without ``--batch`` the endpoint
is a plain `def`, which FastAPI runs in its thread pool. With it, images are decoded in threads, and decoded images
that wait for the model are captioned together. The ONNX Runtime peer has the same application without torch:
module-level imports are only what that peer needs.
"""

import asyncio
import contextlib
import io
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from PIL import Image

from snapcap.benchmarks.harness.arguments import make_server_parser

CHATS = ("idefics3", "llava", "qwen3_vl")  # models that follow an instruction
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batcher(Generic[Item, Answer]):
    """Runs batches one after the other in a thread."""

    def __init__(self, run: Callable[[Sequence[Item]], Sequence[Answer]], most: int) -> None:
        """``run`` returns as many answers as it gets items. ``most`` is the greatest number of items in a batch."""
        self._run = run
        self._most = most
        self._waiting: SimpleQueue[tuple[Item, Future[Answer]]] = SimpleQueue()
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
        with contextlib.suppress(Empty):
            while len(batch) < self._most:
                batch.append(self._waiting.get_nowait())
        # A request that was cancelled is not run.
        running = [each for each in batch if each[1].set_running_or_notify_cancel()]
        return running or self._next_batch()


def decode(image: bytes) -> Image.Image:
    return Image.open(io.BytesIO(image)).convert("RGB")


class Captioner:
    """Runs ``generate`` of the class that the checkpoint names, greedily, as in its documentation."""

    def __init__(self, folder: str, device: str) -> None:
        import torch
        import transformers

        (architecture,) = _read(folder, "config.json")["architectures"]
        model_class: Any = getattr(transformers, architecture)
        # Version 5 has two variants of each processor. The plain one uses torchvision if it is installed.
        processor = _read(folder, "preprocessor_config.json")["image_processor_type"]
        plain: Any = getattr(transformers, f"{processor}Pil", None) or getattr(transformers, processor)
        tokenizer_class: Any = transformers.AutoTokenizer
        self._processor = plain.from_pretrained(folder)
        self._tokenizer = tokenizer_class.from_pretrained(folder)
        self._device = device
        self._dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._model = model_class.from_pretrained(folder, dtype=self._dtype).to(device).eval()
        self._ends = _ends(self._model)
        self._prompt = _prompt(folder, self._model, self._tokenizer)
        # The limit is passed to `generate`, because BLIP's decoder does not read the checkpoint's
        # generation_config.json.
        limit = self._model.generation_config.max_new_tokens
        self._limit = {} if limit is None else {"max_new_tokens": limit}

    def captions(self, pictures: Sequence[Image.Image]) -> list[dict[str, Any]]:
        """Returns the captions of a batch. A model for images of any shape takes images of one shape at a time."""
        given: list[Any] = list(pictures)
        settings: dict[str, Any] = {"return_tensors": "pt"}
        if self._model.config.model_type == "idefics3":  # no image is split into tiles
            given, settings = [[picture] for picture in pictures], {"do_image_splitting": False, **settings}
        return self.generate(self._processor(given, **settings))

    def generate(self, processed: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the captions of images that the processor has processed, with their numbers of tokens."""
        import torch

        with torch.inference_mode():
            inputs = self._inputs(processed)
            rows = self._model.generate(**inputs, do_sample=False, num_beams=1, **self._limit).tolist()
        # A caption follows an instruction, or the start token.
        before = inputs["input_ids"].shape[1] if self._model.config.model_type in CHATS else 1
        rows = [row[before:] for row in rows]
        texts = self._tokenizer.batch_decode(rows, skip_special_tokens=True)
        counts = [sum(token not in self._ends for token in row) for row in rows]
        return [{"caption": text.strip(), "tokens": count} for text, count in zip(texts, counts, strict=True)]

    def _inputs(self, processed: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the model's inputs for a batch. The placeholder stands for all tokens of an image."""
        import torch

        pixels, grids, ids = processed["pixel_values"], processed.get("image_grid_thw"), self._prompt
        given = {"pixel_values": pixels.to(self._dtype)}
        if ids:
            image = self._model.config.image_token_id
            place = ids.index(image)
            ids = [*ids[:place], *[image] * _image_tokens(self._model, processed), *ids[place + 1 :]]
            given["input_ids"] = torch.tensor([ids] * len(pixels if grids is None else grids))
        if grids is not None:
            given |= {"image_grid_thw": grids, "mm_token_type_ids": (given["input_ids"] == image).int()}
        return {name: each.to(self._device) for name, each in given.items()}


def _image_tokens(model: Any, processed: Mapping[str, Any]) -> int:
    """Returns the number of tokens of each image."""
    config, vision = model.config, model.config.vision_config
    if config.model_type == "qwen3_vl":
        return int(processed["image_grid_thw"][0].prod() // vision.spatial_merge_size**2)
    is_florence = config.model_type == "florence2"
    side = math.prod(vision.patch_stride) if is_florence else vision.patch_size * getattr(config, "scale_factor", 1)
    height, width = processed["pixel_values"].shape[-2:]
    return int((height // side) * (width // side) + is_florence)


def _prompt(folder: str, model: Any, tokenizer: Any) -> list[int]:
    """Returns the ids that a model reads, with one placeholder for the image. Empty for most models.

    Florence-2 gets its first task. A model with a chat template gets a message of one image and the default
    instruction.
    """
    kind = model.config.model_type
    if kind == "florence2":
        task = tokenizer("What does the image describe?", add_special_tokens=False)["input_ids"]
        return [model.config.image_token_id, *task, model.generation_config.eos_token_id]
    if kind not in CHATS:
        return []
    content = [{"type": "image"}, {"type": "text", "text": "Can you describe this image?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        chat_template=_read(folder, "chat_template.json")["chat_template"],
        add_generation_prompt=True,
        tokenize=False,
    )
    if kind == "idefics3":
        text = text.replace("<image>", "<fake_token_around_image><global-img><image><fake_token_around_image>")
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def _read(folder: str, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(folder) / name).read_text())
    return content


def _ends(model: Any) -> set[int]:
    """Returns the tokens that end or pad a row."""
    if model.config.model_type == "blip":  # its captions end with [SEP]
        return {model.config.text_config.sep_token_id, model.config.text_config.pad_token_id}
    end = model.generation_config.eos_token_id
    return set() if end is None else {end, model.generation_config.pad_token_id}


def create_app(
    decode: Callable[[bytes], Item], run: Callable[[Sequence[Item]], Sequence[dict[str, Any]]], batch: int
) -> Any:
    """Returns the application. ``decode`` decodes an image, ``run`` captions decoded images, and ``batch`` is the
    greatest number of images in a batch, or 0."""
    from fastapi import Body, FastAPI, Request
    from fastapi.responses import JSONResponse

    app = FastAPI()
    if not batch:

        @app.post("/caption")
        def caption(image: bytes = Body(media_type="application/octet-stream")) -> JSONResponse:
            return JSONResponse(run([decode(image)])[0])

        return app

    batcher = Batcher(run, batch)
    decoders = ThreadPoolExecutor(len(os.sched_getaffinity(0)))

    @app.post("/caption")
    async def batched(request: Request) -> JSONResponse:
        image = await request.body()
        decoded = await asyncio.get_running_loop().run_in_executor(decoders, decode, image)
        return JSONResponse(await asyncio.wrap_future(batcher.submit(decoded)))

    return app


def main() -> None:
    options = make_server_parser(__doc__, port=8100).parse_args()
    captioner = Captioner(options.model, options.device)
    app = create_app(decode, captioner.captions, options.batch)
    import uvicorn

    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
