"""Makes images and preprocessor configurations for the tests of the image transform."""

import io
import json
import struct
from collections.abc import Sequence
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


def masked(
    image: Image.Image, masks: Sequence[int], bits: int = 32, head: int = 108, compression: int = 3
) -> bytes:
    """A BMP that says which bits of a pixel are red, green, blue and alpha."""
    pixels = np.zeros((image.height, image.width), np.uint64)
    for mask, colour in zip(masks, np.asarray(image.convert("RGBA")).transpose(2, 0, 1)[:, ::-1], strict=False):
        if mask:
            low = mask & -mask
            pixels |= np.round(colour / 255 * (mask // low)).astype(np.uint64) * np.uint64(low)
    rows = np.zeros((image.height, -(-image.width * bits // 32) * 32 // bits), f"<u{bits // 8}")
    rows[:, : image.width] = pixels
    after = struct.pack(f"<{len(masks)}I", *masks)
    header = struct.pack("<IiiHHI20x", head, image.width, image.height, 1, bits, compression) + after
    header = header.ljust(head, b"\0")
    return struct.pack("<2sIII", b"BM", 0, 0, 14 + len(header)) + header + rows.tobytes()


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
