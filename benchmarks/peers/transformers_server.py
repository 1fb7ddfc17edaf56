"""Serves the plain peer: FastAPI and transformers' `generate`, one image at a time or in batches.

    python -m snapcap.benchmarks.peers.transformers_server --model models/demo --port 8100 [--batch 16]

The model is loaded before the port is bound. A request's body is the image itself. Without ``--batch`` the endpoint
is a plain `def`, which FastAPI runs in its thread pool. With it, images that wait for the model are captioned
together, by the `Batcher` that the ONNX Runtime peer has too: module-level imports are only what that peer needs.
"""

import asyncio
import io
import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from snapcap.benchmarks.harness.arguments import make_server_parser

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
        while len(batch) < self._most:
            try:
                batch.append(self._waiting.get_nowait())
            except Empty:
                break
        # A request that was cancelled is not run.
        running = [each for each in batch if each[1].set_running_or_notify_cancel()]
        return running or self._next_batch()


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
        self._is_tiled = hasattr(self._model.config, "scale_factor")
        self._is_any_shape = self._model.config.model_type == "qwen3_vl"
        self._prompt = _prompt(folder, self._model, self._tokenizer)
        # The limit is passed to `generate`, because BLIP's decoder does not read the checkpoint's
        # generation_config.json.
        limit = self._model.generation_config.max_new_tokens
        self._limit = {} if limit is None else {"max_new_tokens": limit}

    def pixels(self, images: list[bytes]) -> Any:
        """Returns encoded images as one tensor [B, 3, H, W] on the device. A model for images of any shape gets the
        patches and the grids of images, which must be of one shape."""
        from PIL import Image

        pictures = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
        if self._is_tiled:  # no image is split into tiles
            settings = {"do_image_splitting": False, "return_tensors": "pt"}
            batch = self._processor([[picture] for picture in pictures], **settings).pixel_values
        elif self._is_any_shape:
            return self._processor(pictures, return_tensors="pt").to(self._device, self._dtype)
        else:
            batch = self._processor(pictures, return_tensors="pt").pixel_values
        return batch.to(self._device, self._dtype)

    def generate(self, pixels: Any) -> list[dict[str, Any]]:
        """Returns the captions of a batch, with their numbers of tokens."""
        import torch

        with torch.inference_mode():
            inputs = self._inputs(pixels)
            rows = self._model.generate(**inputs, do_sample=False, num_beams=1, **self._limit).tolist()
        # A caption follows an instruction, or the start token.
        before = inputs["input_ids"].shape[1] if _is_chat(self._model) else 1
        rows = [row[before:] for row in rows]
        texts = self._tokenizer.batch_decode(rows, skip_special_tokens=True)
        counts = [sum(token not in self._ends for token in row) for row in rows]
        return [{"caption": text.strip(), "tokens": count} for text, count in zip(texts, counts, strict=True)]

    def _inputs(self, pixels: Any) -> dict[str, Any]:
        """Returns the model's inputs for a batch."""
        import torch

        ids, count = self._prompt, len(pixels)
        given = {"pixel_values": pixels}
        if self._is_any_shape:
            given, image = dict(pixels), self._model.config.image_token_id
            grids = given["image_grid_thw"]
            count, place = len(grids), ids.index(image)
            # The placeholder stands for as many tokens as squares of 2 × 2 patches.
            ids = [*ids[:place], *[image] * (int(grids[0].prod()) // 4), *ids[place + 1 :]]
            given["mm_token_type_ids"] = torch.tensor([[each == image for each in ids]] * count).int()
        if ids:
            given["input_ids"] = torch.tensor([ids] * count)
        return {name: each.to(self._device) for name, each in given.items()}


def _prompt(folder: str, model: Any, tokenizer: Any) -> list[int]:
    """Returns the ids that a model reads beside the pixels, image placeholders included. Empty for most models."""
    if _is_chat(model):
        return _chat_prompt(folder, model, tokenizer)
    return _task_prompt(folder, model, tokenizer) if model.config.model_type == "florence2" else []


def _is_chat(model: Any) -> bool:
    return model.config.model_type in ("idefics3", "llava", "qwen3_vl")


def _task_prompt(folder: str, model: Any, tokenizer: Any) -> list[int]:
    """Returns the ids of Florence-2's first task."""
    size = _read(folder, "preprocessor_config.json")["size"]
    stride = math.prod(model.config.vision_config.patch_stride)
    image = [model.config.image_token_id] * ((size["height"] // stride) * (size["width"] // stride) + 1)
    text: list[int] = tokenizer("What does the image describe?", add_special_tokens=False)["input_ids"]
    return [*image, *text, model.generation_config.eos_token_id]


def _chat_prompt(folder: str, model: Any, tokenizer: Any) -> list[int]:
    """Returns the ids of a message of one image and the default instruction, for a model with a chat template."""
    content = [{"type": "image"}, {"type": "text", "text": "Can you describe this image?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        chat_template=_read(folder, "chat_template.json")["chat_template"],
        add_generation_prompt=True,
        tokenize=False,
    )
    if model.config.model_type == "qwen3_vl":  # with one placeholder
        own: list[int] = tokenizer(text)["input_ids"]
        return own
    vision, scale = model.config.vision_config, getattr(model.config, "scale_factor", 1)
    image = "<image>" * (vision.image_size // vision.patch_size // scale) ** 2
    if model.config.model_type == "idefics3":
        around = "<fake_token_around_image>"
        image = f"{around}<global-img>{image}{around}"
    ids: list[int] = tokenizer(text.replace("<image>", image))["input_ids"]
    return ids


def _read(folder: str, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(folder) / name).read_text())
    return content


def _ends(model: Any) -> set[int]:
    """Returns the tokens that end or pad a row."""
    text = getattr(model.config, "text_config", None)
    if not hasattr(text, "sep_token_id"):
        text = None  # only BLIP's captions end with [SEP]
    end = model.generation_config.eos_token_id if text is None else text.sep_token_id
    padding = (model.generation_config if text is None else text).pad_token_id
    return set() if end is None else {end, padding}


def create_app(captioner: Captioner, batch: int) -> Any:
    """Returns the application over a loaded model. ``batch`` is the greatest number of images in a batch, or 0."""
    from fastapi import Body, FastAPI, Request

    app = FastAPI()
    if not batch:

        @app.post("/caption")
        def caption(image: bytes = Body(media_type="application/octet-stream")) -> dict[str, Any]:
            return captioner.generate(captioner.pixels([image]))[0]

        return app

    def run(images: Sequence[bytes]) -> list[dict[str, Any]]:
        return captioner.generate(captioner.pixels(list(images)))

    batcher = Batcher(run, batch)

    @app.post("/caption")
    async def batched(request: Request) -> dict[str, Any]:
        answer: dict[str, Any] = await asyncio.wrap_future(batcher.submit(await request.body()))
        return answer

    return app


def main() -> None:
    options = make_server_parser(__doc__, port=8100).parse_args()
    captioner = Captioner(options.model, options.device)
    app = create_app(captioner, options.batch)
    import uvicorn

    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
