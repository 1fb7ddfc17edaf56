"""transformers' own captioner over a checkpoint folder: what all peers run."""

import io
from typing import Any

from benchmarks.marks import mark


class Captioner:
    """`VisionEncoderDecoderModel.generate`, greedy, as its documentation has it."""

    def __init__(self, folder: str, device: str, compiled: bool) -> None:
        """``compiled``: encoder and decoder through `torch.compile` with its defaults."""
        import torch

        mark("import_torch")
        import transformers

        # Version 5 has the processor twice; the plain one wants torchvision where that is installed.
        plain: Any = getattr(transformers, "ViTImageProcessorPil", None) or transformers.ViTImageProcessor
        model_class: Any = transformers.VisionEncoderDecoderModel
        tokenizer_class: Any = transformers.AutoTokenizer
        mark("import_transformers")
        self._processor = plain.from_pretrained(folder)
        self._tokenizer = tokenizer_class.from_pretrained(folder)
        self._device = device
        self._dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._model = model_class.from_pretrained(folder, dtype=self._dtype).to(device).eval()
        if compiled:
            self._model.encoder = torch.compile(self._model.encoder)
            self._model.decoder = torch.compile(self._model.decoder)
        mark("load_model")

    def pixels(self, images: list[bytes]) -> Any:
        """Encoded images to one tensor [B, 3, H, W] on the device."""
        from PIL import Image

        pictures = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
        batch = self._processor(pictures, return_tensors="pt").pixel_values
        return batch.to(self._device, self._dtype)

    def generate(self, pixels: Any) -> list[dict[str, Any]]:
        """Captions of a batch, with their numbers of tokens."""
        import torch

        with torch.inference_mode():
            rows = self._model.generate(pixels, do_sample=False, num_beams=1).tolist()
        settings = self._model.generation_config
        ends = set() if settings.eos_token_id is None else {settings.eos_token_id, settings.pad_token_id}
        texts = self._tokenizer.batch_decode(rows, skip_special_tokens=True)
        counts = [sum(token not in ends for token in row[1:]) for row in rows]
        return [{"caption": text.strip(), "tokens": count} for text, count in zip(texts, counts, strict=True)]
