"""Paints a scene: shapes, textures, background, then light, blur, noise and JPEG artefacts.

    python -m snapcap.models.demo.training.drawing --out models/demo/samples

This command paints the sample pictures. The module imports only Pillow and numpy.
"""

import argparse
import io
import json
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from snapcap.models.demo.training.scenes import EXTENT, Placed, Scene, scene_of

Floats = NDArray[np.float32]

INK = {
    "red": (215, 35, 40),
    "orange": (250, 135, 20),
    "yellow": (250, 220, 40),
    "green": (45, 190, 75),
    "blue": (40, 75, 220),
    "purple": (125, 40, 165),
    "pink": (255, 140, 195),
}
DARK_INKS = ("red", "blue", "purple")  # their texture is light; the texture of other colours is dark
GROUND = {
    "white": (242, 242, 242),
    "gray": (128, 128, 128),
    "black": (20, 20, 20),
    "sand": (205, 178, 135),
    "grass": (58, 100, 45),
}
OVERSAMPLING = 2
FIRST = 100_000  # number far behind the held-out scenes of the accuracy measurement
SIZE = 192  # twice the model's image size, so that serving a sample resizes it
WANTED = {"one": 2, "group": 2, "inside": 2, "pair": 4, "row": 2}


def paint(scene: Scene, size: int = 96) -> Image.Image:
    """Paints the scene as an RGB picture of `size` × `size` pixels. A scene gives the same picture every time."""
    # A separate random stream, so that painting does not change the layout.
    lots = np.random.default_rng((scene.seed, 1))
    scale = size * OVERSAMPLING / EXTENT
    canvas = _background(lots, scene.background, size * OVERSAMPLING)
    for placed in scene.placed:
        _paint_thing(lots, canvas, placed, scale)
    picture = canvas.resize((size, size), Image.Resampling.BOX)
    return _photograph(lots, picture, size)


def _background(lots: np.random.Generator, name: str, size: int) -> Image.Image:
    colour = np.array(GROUND[name], np.float32) + lots.uniform(-12, 12)
    ground = np.full((size, size, 3), colour, np.float32)
    if name in ("sand", "grass"):  # specks of sand, and blades of grass that are taller than wide
        cell, strength = ((2, 2), 16.0) if name == "sand" else ((10, 2), 26.0)
        unit = size / EXTENT / OVERSAMPLING
        rows, columns = (max(1, round(size / (length * unit))) for length in cell)
        grain = Image.fromarray(lots.normal(0, strength, (rows, columns)).astype(np.float32))
        ground += np.asarray(grain.resize((size, size), Image.Resampling.BILINEAR))[..., None]
    return Image.fromarray(np.clip(ground, 0, 255).astype(np.uint8))


def _paint_thing(lots: np.random.Generator, canvas: Image.Image, placed: Placed, scale: float) -> None:
    radius = placed.radius * scale
    half = int(np.ceil(radius)) + 1
    turn = _rotation(placed.angle)
    outline = outlines()[placed.thing.shape] @ turn.T * radius + half
    points = [(float(x), float(y)) for x, y in outline]
    ink = np.array(INK[placed.thing.colour], np.float32) + lots.uniform(-12, 12, 3)
    fill = tuple(int(value) for value in np.clip(ink, 0, 255))
    mask = Image.new("L", (2 * half, 2 * half))
    ImageDraw.Draw(mask).polygon(points, fill=255)
    tile = Image.new("RGB", mask.size, fill)
    if placed.thing.texture != "plain":
        level = int(lots.uniform(235, 255) if placed.thing.colour in DARK_INKS else lots.uniform(10, 35))
        pattern = _pattern(lots, placed, half, scale)
        tile.paste((level, level, level), mask=Image.fromarray(pattern.astype(np.uint8) * 255))
        # Texture and background may have the same colour. An outline in the thing's own colour keeps its shape
        # visible.
        width = max(1, round(1.2 * scale))
        ImageDraw.Draw(tile).line([*points, points[0], points[1]], fill=fill, width=width, joint="curve")
    corner = round(placed.x * scale) - half, round(placed.y * scale) - half
    canvas.paste(tile, corner, mask)


def _pattern(lots: np.random.Generator, placed: Placed, half: int, scale: float) -> NDArray[np.bool_]:
    """Returns a mask of 2 × `half` pixels a side, true where the texture has its second colour."""
    pitch = lots.uniform(5.5, 6.5) + 0.15 * (placed.radius - 12)
    axis = (np.arange(2 * half, dtype=np.float32) - half) / (scale * pitch)
    turn = _rotation(lots.uniform(0, 2 * np.pi))
    shift = lots.uniform(0, 1, 2)
    u = axis[None, :] * turn[0, 0] + axis[:, None] * turn[0, 1] + shift[0]
    v = axis[None, :] * turn[1, 0] + axis[:, None] * turn[1, 1] + shift[1]
    if placed.thing.texture == "striped":
        return np.asarray(u % 1 < 0.5)
    if placed.thing.texture == "dotted":
        return np.asarray((u % 1 - 0.5) ** 2 + (v % 1 - 0.5) ** 2 < 0.3**2)
    return np.asarray((u * 0.75 % 1 < 0.5) ^ (v * 0.75 % 1 < 0.5))


def _photograph(lots: np.random.Generator, picture: Image.Image, size: int) -> Image.Image:
    """Adds the flaws of a poor camera: uneven light, blur, noise, and sometimes JPEG artefacts."""
    blur = lots.uniform(0, 0.6) * size / EXTENT
    picture = picture.filter(ImageFilter.GaussianBlur(blur))
    slope = lots.uniform(-0.12, 0.12, 2)
    axis = np.linspace(-0.5, 0.5, size, dtype=np.float32)
    light = lots.uniform(0.86, 1.08) + slope[0] * axis[None, :] + slope[1] * axis[:, None]
    noise = lots.standard_normal((size, size, 3), np.float32) * np.float32(lots.uniform(0, 9))
    pixels = np.asarray(picture, np.float32) * light[..., None].astype(np.float32) + noise
    picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    if lots.random() < 0.7:
        stream = io.BytesIO()
        picture.save(stream, "JPEG", quality=int(lots.integers(55, 96)))
        picture = Image.open(stream).convert("RGB")
    return picture


def _rotation(angle: float) -> Floats:
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[cos, -sin], [sin, cos]], np.float32)


@cache
def outlines() -> dict[str, Floats]:
    """Returns each shape's outline, [points, 2], inside the unit circle around the origin."""
    circle = _polar(np.full(48, 0.9))
    points = np.linspace(0, 2 * np.pi, 64, endpoint=False)
    waves = -13 * np.cos(points) + 6 * np.cos(2 * points) + 2 * np.cos(3 * points) + np.cos(4 * points)
    heart = np.stack([16 * np.sin(points) ** 3, waves], axis=1)  # the usual heart curve, notched deeper
    heart -= (heart.max(0) + heart.min(0)) / 2
    arm, tip = 0.3, float(np.sqrt(1 - 0.3**2))
    quarter = np.array([[tip, -arm], [tip, arm], [arm, arm]])
    cross = np.concatenate([quarter @ _rotation(turn * np.pi / 2).T for turn in range(4)])
    return {
        "circle": circle,
        "square": _polar(np.ones(4)),
        "triangle": _polar(np.ones(3)),
        "star": _polar(np.tile([1.0, 0.42], 5)),
        "cross": cross.astype(np.float32),
        "heart": (heart / np.hypot(*heart.T).max()).astype(np.float32),
        "moon": _moon(),
    }


def _polar(radii: NDArray[np.float64]) -> Floats:
    angles = np.linspace(0, 2 * np.pi, len(radii), endpoint=False)
    return np.stack([np.cos(angles) * radii, np.sin(angles) * radii], axis=1).astype(np.float32)


def _moon() -> Floats:
    """Returns the outline of the unit circle without a circle of radius 0.8 around (0.62, 0)."""
    centre, bite = 0.62, 0.8
    x = (1 - bite**2 + centre**2) / (2 * centre)  # where the two circles meet
    outer = np.linspace(np.arccos(x), 2 * np.pi - np.arccos(x), 48)
    meet = np.arctan2(np.sqrt(1 - x**2), x - centre)
    inner = np.linspace(2 * np.pi - meet, meet, 32)[1:-1]
    arcs = [(np.cos(outer), np.sin(outer)), (centre + bite * np.cos(inner), bite * np.sin(inner))]
    return np.concatenate([np.stack(arc, axis=1) for arc in arcs]).astype(np.float32)


def write_samples(folder: Path) -> None:
    """Paints the first held-out scenes of each kind, each with a background unlike the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    captions: dict[str, str] = {}
    for kind, wanted in WANTED.items():
        scenes, background = (scene_of("held_out", index) for index in count(FIRST)), ""
        for number in range(1, wanted + 1):
            scene = next(each for each in scenes if each.kind == kind and each.background != background)
            name, background = f"{kind}-{number}.png", scene.background
            paint(scene, SIZE).save(folder / name, optimize=True)
            captions[name] = scene.caption
    (folder / "captions.json").write_text(json.dumps(captions, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures and captions.json")
    write_samples(parser.parse_args().out)
