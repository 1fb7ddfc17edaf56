"""Captions with transformers' `generate`, and measures it without a server.

    python -m snapcap.benchmarks.peers.transformers_model --model FOLDER --images FOLDER
        [--batches 1,64] [--compile]

Prints one result line: for each batch size the captions/s and the percentiles of a whole batch. Images are decoded
before.
"""

import io
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from snapcap.benchmarks.harness.arguments import make_parser
from snapcap.benchmarks.harness.marks import mark, memory, result
from snapcap.benchmarks.harness.measurements import percentiles_ms
from snapcap.benchmarks.harness.workload import read_images

# The parts of each class that `generate` calls.
_PARTS = {
    "VisionEncoderDecoderModel": ("encoder", "decoder"),
    "BlipForConditionalGeneration": ("vision_model", "text_decoder"),
    "GitForCausalLM": ("git",),
    "Florence2ForConditionalGeneration": ("model",),
    "Idefics3ForConditionalGeneration": ("model",),
    "LlavaForConditionalGeneration": ("model",),
}
WARM_UPS = 2


class Captioner:
    """Runs ``generate`` of the class that the checkpoint names, greedily, as in its documentation."""

    def __init__(self, folder: str, device: str, compiled: bool) -> None:
        """With ``compiled``, encoder and decoder go through `torch.compile` with its defaults."""
        import torch

        mark("import_torch")
        import transformers

        (architecture,) = _read(folder, "config.json")["architectures"]
        model_class: Any = getattr(transformers, architecture)
        # Version 5 has two variants of each processor. The plain one uses torchvision if it is installed.
        processor = _read(folder, "preprocessor_config.json")["image_processor_type"]
        plain: Any = getattr(transformers, f"{processor}Pil", None) or getattr(transformers, processor)
        tokenizer_class: Any = transformers.AutoTokenizer
        mark("import_transformers")
        self._processor = plain.from_pretrained(folder)
        self._tokenizer = tokenizer_class.from_pretrained(folder)
        self._device = device
        self._dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._model = model_class.from_pretrained(folder, dtype=self._dtype).to(device).eval()
        self._ends = _ends(self._model)
        self._is_tiled = hasattr(self._model.config, "scale_factor")
        self._prompt = _prompt(folder, self._model, self._tokenizer)
        # Number of tokens before a caption: an instruction's, or the start token.
        self._before = len(self._prompt) if _is_chat(self._model) else 1
        # The limit is passed to `generate`, because BLIP's decoder does not read the checkpoint's
        # generation_config.json.
        limit = self._model.generation_config.max_new_tokens
        self._limit = {} if limit is None else {"max_new_tokens": limit}
        if compiled:
            for part in _PARTS[architecture]:
                getattr(self._model, part).compile()
        mark("load_model")

    def pixels(self, images: list[bytes]) -> Any:
        """Returns encoded images as one tensor [B, 3, H, W] on the device."""
        from PIL import Image

        pictures = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
        if self._is_tiled:  # no image is split into tiles
            settings = {"do_image_splitting": False, "return_tensors": "pt"}
            batch = self._processor([[picture] for picture in pictures], **settings).pixel_values
        else:
            batch = self._processor(pictures, return_tensors="pt").pixel_values
        return batch.to(self._device, self._dtype)

    def generate(self, pixels: Any) -> list[dict[str, Any]]:
        """Returns the captions of a batch, with their numbers of tokens."""
        import torch

        with torch.inference_mode():
            given = {"do_sample": False, "num_beams": 1, **self._limit}
            if self._prompt:
                given["input_ids"] = torch.tensor([self._prompt] * len(pixels), device=self._device)
            rows = self._model.generate(pixel_values=pixels, **given).tolist()
        rows = [row[self._before :] for row in rows]
        texts = self._tokenizer.batch_decode(rows, skip_special_tokens=True)
        counts = [sum(token not in self._ends for token in row) for row in rows]
        return [{"caption": text.strip(), "tokens": count} for text, count in zip(texts, counts, strict=True)]


def _prompt(folder: str, model: Any, tokenizer: Any) -> list[int]:
    """Returns the ids that a model reads beside the pixels, image placeholders included. Empty for most models."""
    if _is_chat(model):
        return _chat_prompt(folder, model, tokenizer)
    return _task_prompt(folder, model, tokenizer) if model.config.model_type == "florence2" else []


def _is_chat(model: Any) -> bool:
    return model.config.model_type in ("idefics3", "llava")


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


def measure(run: Callable[[], object], batch: int, seconds: float) -> dict[str, float]:
    """Returns captions/s and latencies of batches, one after the other. ``run`` captions one batch."""
    for _ in range(WARM_UPS):
        run()
    latencies: list[float] = []
    while sum(latencies) < seconds:
        began = time.perf_counter()
        run()
        latencies.append(time.perf_counter() - began)
    rate = batch * len(latencies) / sum(latencies)
    return {"captions_per_s": rate, "n": len(latencies), **percentiles_ms(latencies)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--images", type=Path, required=True, help="folder with images and captions.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batches", default="1", help="batch sizes, such as 1,16,64")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each batch size")
    parser.add_argument("--compile", action="store_true", help="torch.compile over encoder and decoder")
    options = parser.parse_args()
    captioner = Captioner(options.model, options.device, options.compile)
    mark("ready")
    samples = read_images(options.images)
    images = [data for data, _ in samples]
    for data, caption in samples[:3]:
        text = captioner.generate(captioner.pixels([data]))[0]["caption"]
        if caption is not None and text != caption:
            raise RuntimeError(f"a wrong caption: {text!r}, expected {caption!r}")
    rates = {}
    for batch in map(int, options.batches.split(",")):
        pixels = captioner.pixels((images * batch)[:batch])
        rates[str(batch)] = measure(partial(captioner.generate, pixels), batch, options.seconds)
    result({"concurrency": rates, **memory()})


if __name__ == "__main__":
    main()
