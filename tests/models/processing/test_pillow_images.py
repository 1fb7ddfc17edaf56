"""Pillow images of a program: each mode that has colours is read, and what cannot be is told in a sentence."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.parity.pictures import encoded, scene

from snapcap.models.processing.image_formats import ImageError
from snapcap.models.processing.transform import ImageTransform

TRANSFORM = ImageTransform((30, 40))
PICTURE = scene(40, 30)
FLOATS = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


@pytest.mark.parametrize("mode", sorted({*Image.MODES, *FLOATS, "La", "RGBa", "RGBX", "HSV", "LAB"}))
def test_each_mode_is_read(mode: str) -> None:
    assert TRANSFORM.convert(Image.new(mode, (40, 30))).shape == (30, 40, 3)


def test_a_mode_that_has_no_colours_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CIELAB with a Pillow that has no LittleCMS."""

    def refuse(image: Image.Image, mode: str, *_: object, **__: object) -> Image.Image:
        raise ValueError(f"conversion from {image.mode} to {mode} not supported")

    image = Image.new("LAB", (40, 30))
    monkeypatch.setattr(Image.Image, "convert", refuse)
    with pytest.raises(ImageError) as error:
        TRANSFORM.convert(image)
    assert error.value.reason == "unsupported_format"
    assert str(error.value) == 'a Pillow image of mode LAB is not read; give image.convert("RGB")'


@pytest.mark.parametrize("mode", ["La", "RGBa", "PA"])
def test_odd_modes_have_their_colours(mode: str) -> None:
    image = PICTURE.convert("LA" if mode == "La" else "RGBA").convert(mode)
    expected = np.asarray(PICTURE.convert("L").convert("RGB") if mode == "La" else image.convert("RGB"))
    assert np.abs(TRANSFORM.convert(image).astype(int) - expected).max() <= 1


def test_whole_numbers_and_floats_are_scaled() -> None:
    grey = np.asarray(PICTURE.convert("L"))
    for shades in (
        grey.astype(np.int32),
        grey.astype(np.int32) * 256,
        grey.astype(np.float32),
        grey.astype(np.float32) / 255,
    ):
        pixels = TRANSFORM.convert(Image.fromarray(shades))
        assert np.abs(pixels[..., 0].astype(int) - grey).max() <= 1


def test_a_float_that_is_no_number_is_no_crash() -> None:
    for value in (float("nan"), float("inf"), -1e30):
        assert TRANSFORM.convert(Image.new("F", (40, 30), value)).shape == (30, 40, 3)


def test_a_closed_image_is_told_so(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(encoded(PICTURE))
    loaded, new = Image.open(file), Image.new("RGB", (4, 4))
    loaded.load()
    with Image.open(file) as left:
        pass
    with file.open("rb") as opened:
        behind = Image.open(opened)
    for image in (loaded, new):
        image.close()
    for image in (loaded, new, left, behind):
        with pytest.raises(ImageError, match="the Pillow image or its file is closed; give an image that is open"):
            TRANSFORM.convert(image)


def test_an_opened_image_that_is_damaged(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(encoded(PICTURE)[:-200])
    with Image.open(file) as image, pytest.raises(ImageError, match="the PNG data is incomplete or damaged"):
        TRANSFORM.convert(image)
