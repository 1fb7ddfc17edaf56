"""Makes images and preprocessor configurations for the tests of the image transform."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from snapcap.models.processing.transform import ImageTransform


def scene(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture with flat areas, edges, a gradient and noise."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 255, width)[None, :, None] * np.ones((height, 1, 3)) * [1.0, 0.6, 0.2]
    pixels = np.clip(ramp + rng.normal(0, 12, (height, width, 3)), 0, 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    draw = ImageDraw.Draw(image)
    draw.ellipse((width // 8, height // 8, width // 2, height // 2), fill=(200, 30, 60))
    draw.rectangle((width // 2, height // 2, width, height), outline=(10, 240, 90), width=3)
    return image


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_config(folder: Path, **fields: Any) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    return folder


def normalised(transform: ImageTransform, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Pixels, uint8 [H, W, 3], as the encoder normalises them on the device: float32 [3, H, W]."""
    by = transform.normalisation
    mean, std = (np.array(values, np.float32) for values in (by.mean, by.std))
    x = pixels.astype(np.float32) * np.float32(by.rescale)
    result: NDArray[np.float32] = ((x - mean) / std).transpose(2, 0, 1)
    return result
