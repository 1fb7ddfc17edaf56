"""The ways a picture or a preprocessor configuration can be bad: each has a reason and a remedy."""

import random
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.parity.pictures import encoded, scene, write_config

from snapcap.models.config import ConfigError
from snapcap.models.processing.image import lift_pillows_limit
from snapcap.models.processing.image_formats import ImageError
from snapcap.models.processing.transform import ImageTransform


def bad_pictures() -> dict[str, tuple[bytes, str]]:
    jpeg, png, webp = (encoded(scene(90, 70), name) for name in ("JPEG", "PNG", "WEBP"))
    return {
        "nothing": (b"", "empty"),
        "text": (b"hello, this is not a picture", "not_an_image"),
        "json": (b'{"image": "..."}', "not_an_image"),
        "half a jpeg": (jpeg[: len(jpeg) // 2], "truncated"),
        "half a png": (png[: len(png) // 2], "truncated"),
        "half a webp": (webp[: len(webp) // 2], "truncated"),
        "a jpeg's first bytes": (jpeg[:12], "truncated"),
        "noise after the png signature": (png[:8] + b"\x07" * 500, "truncated"),
        "ppm": (encoded(scene(9, 9), "PPM"), "unsupported_format"),
        "png of no depth": (png[:24] + b"\0" + png[25:], "truncated"),
        "png without width": (with_png_size(png, 0), "zero_size"),
        "jpeg without height": (without_height(jpeg), "zero_size"),
        "over the limit": (encoded(Image.new("L", (401, 100))), "too_large"),
        "a bomb": (with_png_size(png, 30_000), "too_large"),
    }


def with_png_size(png: bytes, side: int) -> bytes:
    header = png[12:16] + side.to_bytes(4, "big") * 2 + png[24:29]
    return png[:12] + header + zlib.crc32(header).to_bytes(4, "big") + png[33:]


def without_height(jpeg: bytes) -> bytes:
    frame = jpeg.index(b"\xff\xc0")
    return jpeg[: frame + 5] + bytes(2) + jpeg[frame + 7 :]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("data", "reason"), bad_pictures().values(), ids=bad_pictures().keys())
def test_bad_pictures_have_a_reason_and_a_remedy(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError) as caught:
        ImageTransform((32, 32), max_pixels=40_000).decode(data)
    assert caught.value.reason == reason
    assert "send" in str(caught.value) or "scale it down" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_limit_is_checked_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(image: Image.Image) -> None:
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr("snapcap.models.processing.image._load_rgb", refuse)
    with pytest.raises(ImageError, match="7000×7200 pixels is over the limit of 50000000"):
        ImageTransform((32, 32)).decode(encoded(Image.new("1", (7000, 7200))))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF", "ignore:Tag data", "ignore:Image size")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_the_limit_is_ours_and_not_that_of_pillow(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    data = encoded(scene(90, 70), kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 90 * 70 // 3)
    transform = ImageTransform((8, 8), max_pixels=90 * 70)
    with pytest.raises(ImageError, match=r"over Pillow's limit .* of 4200 pixels"):
        transform.decode(data)
    lift_pillows_limit()
    assert transform.decode(data).pixels.shape == (8, 8, 3)


def test_damaged_files_raise_nothing_but_image_errors() -> None:
    rng = random.Random(3)
    exif = Image.Exif()
    exif[0x0112] = 6
    pictures = [encoded(scene(60, 40), name, exif=exif) for name in ("JPEG", "PNG", "WEBP")]
    reasons: set[str] = set()
    for _ in range(600):
        data = bytearray(rng.choice(pictures))
        for _ in range(rng.choice((1, 4))):
            data[rng.randrange(rng.choice((64, len(data))))] = rng.randrange(256)
        try:
            ImageTransform((32, 32)).decode(bytes(data))
        except ImageError as error:
            reasons.add(error.reason)
    assert {"truncated", "not_an_image"} <= reasons


def test_without_resizing_the_size_must_fit(tmp_path: Path) -> None:
    write_config(tmp_path, do_resize=False, size=500)
    transform = ImageTransform.from_folder(tmp_path, (40, 60))
    assert transform.decode(encoded(scene(60, 40))).pixels.shape == (40, 60, 3)
    with pytest.raises(ImageError, match=r"61×40 pixels .* send exactly 60×40") as caught:
        transform.decode(encoded(scene(61, 40)))
    assert caught.value.reason == "wrong_size"
    write_config(tmp_path, do_resize=False, do_center_crop=True, crop_size={"height": 40, "width": 60})
    with pytest.raises(ImageError, match="send at least 60×40"):
        ImageTransform.from_folder(tmp_path, (40, 60)).decode(encoded(scene(59, 90)))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"size": {"shortest_edge": 224}}, "size"),
        ({"size": {"longest_edge": 224}}, "size"),
        ({"size": {"shortest_edge": 224, "longest_edge": 300}}, "size"),
        ({"size": 384}, "size"),
        ({"size": {"height": 224, "width": 225}}, "size"),
        ({"size": "big"}, "size"),
        ({"size": True}, "size"),
        ({"do_center_crop": True, "crop_size": 200}, "crop_size"),
        ({"do_center_crop": True, "crop_size": 224, "size": {"shortest_edge": 200}}, "size"),
        ({"image_processor_type": "SamImageProcessor"}, "image_processor_type"),
        ({"feature_extractor_type": "ConvNextFeatureExtractor"}, "feature_extractor_type"),
        ({"do_pad": True}, "do_pad"),
        ({"do_resize": "yes"}, "do_resize"),
        ({"resample": 9}, "resample"),
        ({"resample": True}, "resample"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std"),
        ({"rescale_factor": "1/255"}, "rescale_factor"),
        ({"rescale_factor": float("nan")}, "rescale_factor"),
    ],
)
def test_a_setting_that_is_not_supported_is_named(tmp_path: Path, settings: dict[str, Any], field: str) -> None:
    write_config(tmp_path, **settings)
    with pytest.raises(ConfigError) as caught:
        ImageTransform.from_folder(tmp_path, (224, 224))
    assert caught.value.field == field
    assert str(settings[field]).strip("'") in str(caught.value)
    assert "\n" not in str(caught.value)
