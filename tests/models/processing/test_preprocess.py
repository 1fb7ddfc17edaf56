"""The image transform against transformers' ViT image processor."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from support.parity.pictures import encoded, normalised, scene, write_config

from snapcap.models.processing.image import upright_size
from snapcap.models.processing.transform import ImageTransform

Pixels = NDArray[np.uint8]
ONE_STEP = 1 / 255


def reference(folder: Path, data: bytes) -> NDArray[np.float32]:
    """pixel_values [3, H, W] of transformers on the same file."""
    from transformers.image_utils import load_image
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    processor = ViTImageProcessorPil.from_pretrained(folder)
    values = processor(load_image(Image.open(io.BytesIO(data))), return_tensors="np")["pixel_values"]
    return np.asarray(values[0], np.float32)


def assert_equal_to_transformers(folder: Path, size: tuple[int, int], data: bytes) -> None:
    transform = ImageTransform.from_folder(folder, size)
    ours = normalised(transform, transform.decode(data).pixels)
    theirs = reference(folder, data)
    assert ours.shape == theirs.shape == (3, *size)
    step = ONE_STEP * (transform.normalisation.rescale * 255) / min(transform.normalisation.std)
    assert np.abs(ours - theirs).max() <= step + 1e-6


@pytest.mark.parametrize("picture", [(640, 480), (31, 517), (224, 224), (1, 1), (300, 20), (97, 96)])
@pytest.mark.parametrize("size", [96, 224, 384])
def test_png_is_equal_to_transformers(tmp_path: Path, picture: tuple[int, int], size: int) -> None:
    write_config(tmp_path, size={"height": size, "width": size}, image_processor_type="ViTImageProcessor")
    assert_equal_to_transformers(tmp_path, (size, size), encoded(scene(*picture)))


SETTINGS: list[dict[str, Any]] = [
    {"size": 64, "feature_extractor_type": "ViTFeatureExtractor", "resample": 2},
    {"size": {"height": 48, "width": 80}},
    {"size": [48, 80], "image_processor_type": "ViTImageProcessorFast"},
    *({"size": 64, "resample": number} for number in range(6)),
    {"size": 64, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
    {"size": 64, "image_mean": 0.4, "image_std": 0.3},
    {"size": 64, "do_normalize": False},
    {"size": 64, "do_rescale": False, "do_normalize": False},
    {"size": 64, "do_rescale": False},
    {"size": 64, "rescale_factor": 1 / 127.5, "image_mean": [1, 1, 1], "image_std": [1, 1, 1]},
    {"size": 64, "do_normalize": None, "do_rescale": None, "do_convert_rgb": None},
    {"size": {"shortest_edge": 72}, "do_center_crop": True, "crop_size": {"height": 64, "width": 60}},
    {"size": {"height": 90, "width": 70}, "do_center_crop": True, "crop_size": 64, "do_convert_rgb": True},
    {"do_resize": False, "do_center_crop": True, "crop_size": {"height": 64, "width": 64}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: json.dumps(settings)[:60])
def test_settings_are_equal_to_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    write_config(tmp_path, **settings)
    box: Any = settings.get("crop_size", settings.get("size"))
    size: Any = (box, box) if isinstance(box, int) else tuple(box.values() if isinstance(box, dict) else box)
    for picture in ((200, 133), (133, 200)):
        assert_equal_to_transformers(tmp_path, size, encoded(scene(*picture)))


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    ViTImageProcessorPil(size={"height": 96, "width": 96}, resample=3).save_pretrained(tmp_path)
    transform = ImageTransform.from_folder(tmp_path, (96, 96))
    assert (transform.size, transform.resample, transform.normalisation.mean) == ((96, 96), 3, (0.5, 0.5, 0.5))
    assert_equal_to_transformers(tmp_path, (96, 96), encoded(scene(120, 90)))


@pytest.mark.parametrize("mode", ["L", "P", "1", "LA", "RGBA", "RGB"])
def test_opaque_modes_are_equal_to_transformers(tmp_path: Path, mode: str) -> None:
    write_config(tmp_path, size=64)
    assert_equal_to_transformers(tmp_path, (64, 64), encoded(scene(150, 100).convert(mode)))


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
def test_exif_orientation_is_applied(tmp_path: Path, turn: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    write_config(tmp_path, size=[64, 60])
    options = {"lossless": True} if kind == "WEBP" else {}
    # Below twice the target, where no JPEG is drafted, so that each format must agree exactly.
    assert_equal_to_transformers(tmp_path, (64, 60), encoded(scene(100, 80), kind, exif=exif, **options))


def test_without_a_file_the_defaults_of_vit_hold(tmp_path: Path) -> None:
    data = encoded(scene(80, 60))
    transform = ImageTransform.from_folder(tmp_path, (96, 96), max_pixels=5000)
    assert transform == ImageTransform((96, 96), max_pixels=5000)
    values = normalised(transform, transform.decode(data).pixels)
    write_config(tmp_path, size=96)
    np.testing.assert_allclose(values, reference(tmp_path, data), atol=1e-6)


def test_transparent_pixels_are_white() -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.putpixel((0, 0), (10, 20, 30, 255))
    pixels = ImageTransform((8, 8)).decode(encoded(image)).pixels
    assert pixels[0, 0].tolist() == [10, 20, 30]
    assert (pixels[1:] == 255).all()
    half = Image.new("LA", (8, 8), (0, 128))
    assert ImageTransform((8, 8)).decode(encoded(half)).pixels[0, 0].tolist() == [127, 127, 127]


def test_a_transparent_palette_entry_is_white() -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.putpixel((0, 0), 0)
    pixels = ImageTransform((8, 8)).decode(encoded(image, transparency=1)).pixels
    assert pixels[0, 0].tolist() == [200, 0, 0]
    assert (pixels[1:] == 255).all()


def test_16_bit_greys_are_scaled_not_clipped() -> None:
    grey = (np.arange(64, dtype=np.uint16) * 1024).reshape(8, 8)
    pixels = ImageTransform((8, 8)).decode(encoded(Image.fromarray(grey))).pixels
    assert (pixels == (grey >> 8)[..., None]).all()


@pytest.mark.parametrize(("mode", "dtype"), [("I;16", "<u2"), ("I;16B", ">u2"), ("I", "=i4")])
def test_every_mode_of_16_bits_is_scaled(mode: str, dtype: str) -> None:
    grey = np.random.default_rng(3).integers(0, 1 << 16, (8, 8)).astype(dtype)
    picture = Image.frombytes(mode, (8, 8), grey.tobytes())
    assert (ImageTransform((8, 8)).convert(picture) == (grey >> 8)[..., None]).all()


def test_cmyk_jpeg_is_read() -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    pixels = ImageTransform((16, 16)).decode(encoded(image, "JPEG", quality=95)).pixels
    assert np.abs(pixels.astype(int) - [255, 0, 0]).max() <= 3


def test_only_the_first_frame_is_read() -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    for kind in ("WEBP", "PNG", "MPO"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        decoded = ImageTransform((16, 16)).decode(data)
        assert np.abs(decoded.pixels.astype(int) - [255, 0, 0]).max() <= 3
        assert decoded.format == {"MPO": "jpeg"}.get(kind, kind.lower())


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"size": [224, 160]}, (224, 160)),
        ({"size": {"shortest_edge": 150}, "do_center_crop": True, "crop_size": 128}, (128, 128)),
    ],
)
def test_a_large_jpeg_is_drafted_and_stays_close(
    tmp_path: Path, settings: dict[str, Any], size: tuple[int, int], turn: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    # 1601 and 1203 are no multiples of 2, 4 or 8: the last drafted row and column are not whole.
    data = encoded(scene(1601, 1203), "JPEG", quality=90, exif=exif)
    transform = ImageTransform.from_folder(write_config(tmp_path, **settings), size)
    drafted = normalised(transform, transform.decode(data).pixels)
    difference = np.abs(drafted - reference(tmp_path, data)) * 255 * min(transform.normalisation.std)
    assert difference.max() > 1, "the picture was decoded in full"
    assert difference.mean() < 0.5
    assert difference[:, 2:-2, 2:-2].max() < 6


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("size", [(60, 80), (48, 48), (30, 40)], ids=["as it is", "resized", "a half"])
def test_an_rgb_picture_is_not_copied(monkeypatch: pytest.MonkeyPatch, kind: str, size: tuple[int, int]) -> None:
    data = encoded(scene(80, 60), kind)
    expected = np.asarray(Image.open(io.BytesIO(data)).resize(size[::-1], Image.Resampling.BILINEAR))

    def copy(_: Image.Image) -> Image.Image:
        raise AssertionError("nothing else has these pixels")

    monkeypatch.setattr(Image.Image, "copy", copy)
    pixels = ImageTransform(size).decode(data).pixels
    assert pixels.shape == expected.shape
    assert np.array_equal(pixels, expected)


def test_pixels_are_what_the_encoder_takes() -> None:
    decoded = ImageTransform((48, 80)).decode(encoded(scene(33, 44), "WEBP"))
    assert decoded.pixels.shape == (48, 80, 3)
    assert decoded.pixels.dtype == np.uint8
    assert decoded.pixels.flags.c_contiguous
    assert decoded.format == "webp"


@pytest.mark.parametrize("turn", [1, 3, 6, 7])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_the_size_is_that_of_the_upright_picture_before_it_is_resized(kind: str, turn: int) -> None:
    """Also of a JPEG that is decoded at a fraction of its size, and of an image that Pillow has opened."""
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encoded(scene(803, 401), kind, exif=exif)
    upright = (401, 803) if turn > 4 else (803, 401)
    for transform in (ImageTransform((32, 48)), ImageTransform((32, 48), resize_to=64, do_center_crop=True)):
        assert transform.decode(data).size == upright
    image = Image.open(io.BytesIO(data))
    ImageTransform((32, 48)).convert(image)
    assert upright_size(image) == upright


def test_the_size_of_a_picture_that_is_not_resized_is_its_own() -> None:
    assert ImageTransform((20, 30), do_resize=False).decode(encoded(scene(30, 20))).size == (30, 20)
