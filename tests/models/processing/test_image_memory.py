"""What is estimated that a picture takes is what it takes at most, by the memory of a process that decodes it."""

import io
import json
import struct
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin
from support.attacks.attack_pictures import bmp_in_runs, flat_png, flat_webp, with_key
from support.attacks.hostile_images import png
from support.parity.pictures import encoded, masked, scene
from support.servers.server_process import python

from snapcap.models.processing.image_formats import ImageError, NeedsMemory
from snapcap.models.processing.transform import ImageTransform

# Interpreter, tables, rows that a codec works on: what does not grow with the picture.
SLACK = 8 << 20
# Each picture in a process of its own, forked from one that has decoded before.
PROGRAM = """
import json, os, sys
from snapcap.models.processing.image import load_codecs
from snapcap.models.processing.image_formats import ImageError, NeedsMemory
from snapcap.models.processing.transform import ImageTransform
from snapcap.service.images.parent import picture

def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

def measure(file, size, edge, longest):
    edges = {"resize_to": edge or None, "do_center_crop": bool(edge), "longest_edge": longest or None}
    transform = ImageTransform((size, size), **edges)
    with open(file, "rb") as opened:
        data = opened.read()
    estimate = 0
    try:
        transform.decode(data, 0)
    except NeedsMemory as needs:
        estimate = needs.size
    # The kernel counts pages of a fork in batches: what is written here is there before and after.
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before = memory("VmRSS")
    try:
        transform.decode(data)
        error = ""
    except ImageError as caught:
        error = caught.reason
    return estimate, memory("VmHWM") - before, len(data), error

ImageTransform((16, 16)).decode(picture())
found = []
cases = json.loads(sys.stdin.read())
load_codecs()
for file, size, edge, longest in cases:
    read, write = os.pipe()
    if not os.fork():
        os.write(write, json.dumps(measure(file, size, edge, longest)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found.append(json.loads(pipe.read() or "null"))
    os.wait()
print(json.dumps(found))
"""
TURNED = Image.Exif()
TURNED[0x0112] = 6


def pictures(width: int, height: int) -> Iterator[tuple[str, bytes]]:
    picture = scene(width, height)
    grey = Image.frombytes("I;16", picture.size, picture.convert("LA").tobytes())
    modes = [picture.convert(mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")] + [grey]
    for each in modes:
        yield f"png {each.mode}", encoded(each, compress_level=1)
        yield f"png turned {each.mode}", encoded(each, compress_level=1, exif=TURNED)
    yield "png key", encoded(picture, compress_level=1, transparency=(1, 2, 3))
    yield "png clear entry", encoded(modes[3], compress_level=1, transparency=b"\x80" * 256)
    see_through = picture.copy()
    see_through.putalpha(modes[1])
    yield "png see-through", encoded(see_through, compress_level=1)
    for name, options in (("", {}), (" lossless", {"lossless": True}), (" turned", {"exif": TURNED})):
        yield f"webp{name}", encoded(picture, "WEBP", method=0, **options)
        yield f"webp see-through{name}", encoded(see_through, "WEBP", method=0, **options)
    for mode in ("L", "RGB", "CMYK"):
        for name, more in options_of_jpeg():
            yield f"jpeg {mode}{name}", encoded(picture.convert(mode), "JPEG", **more)
        yield f"jpeg {mode} without its end", encoded(picture.convert(mode), "JPEG")[:-2]
    yield from rarer(picture, see_through)


def rarer(picture: Image.Image, see_through: Image.Image) -> Iterator[tuple[str, bytes]]:
    grey, width, height = picture.convert("L"), *picture.size
    sixteen = Image.frombytes("I;16", picture.size, picture.convert("LA").tobytes())
    yield "png grey key", with_key(encoded(sixteen, compress_level=1), 1)
    wide = grey.resize((width * 6, height)).tobytes()
    raw = b"".join(b"\0" + wide[at : at + width * 6] for at in range(0, len(wide), width * 6))
    yield "png colour key", with_key(png(width, height, zlib.compress(raw, 1), 16, 2), 1, 2, 3)
    for each in (grey, picture.convert("P"), picture):
        yield f"gif {each.mode}", encoded(each, "GIF")
    yield "gif clear", encoded(picture.convert("P"), "GIF", transparency=3)
    for each in (picture.convert("1"), grey, picture.convert("P"), picture, see_through):
        yield f"bmp {each.mode}", encoded(each, "BMP")
    yield "bmp runs", bmp_in_runs(width, height, b"\xff\x07\x01\x09" * 3)
    yield "bmp masks 16", masked(see_through, (0xF00, 0xF0, 0xF, 0xF000), 16)
    yield "bmp masks 32", masked(see_through, (0x3FF, 0xFFC00, 0x3FF00000, 0xC0000000))
    yield "tiff planes", planes_of_16_bits(picture)
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F"):
        for compression in ("raw", "tiff_lzw"):
            yield f"tiff {mode} {compression}", encoded(see_through.convert(mode), "TIFF", compression=compression)
    strip = {"strip_size": 1 << 30, "compression": "tiff_adobe_deflate"}
    yield "tiff in one strip", encoded(see_through, "TIFF", **strip, exif=TURNED)
    yield "tiff jpeg", encoded(picture, "TIFF", compression="jpeg", exif=TURNED)
    for each in (grey, picture, see_through):
        for subsampling in ("4:2:0", "4:4:4"):
            name = f"avif {each.mode} {subsampling}"
            yield name, encoded(each, "AVIF", speed=10, subsampling=subsampling, exif=TURNED)
    if find_spec("pillow_heif"):
        from pillow_heif import register_heif_opener

        register_heif_opener()
        fast = {"preset": "ultrafast"}  # a slower encoder writes fewer bytes, and a decoder takes the same memory
        for each in (picture, see_through):
            yield f"heic {each.mode}", encoded(each, "HEIF", chroma=444, enc_params=fast)


def planes_of_16_bits(picture: Image.Image) -> bytes:
    """A TIFF without compression."""
    pixels = b"".join(np.asarray(band).astype("<u2").tobytes() for band in picture.split())
    size = len(pixels) // 3
    tags = {256: picture.width, 257: picture.height, 258: (16, 16, 16), 262: 2, 277: 3, 278: picture.height}
    directory = TiffImagePlugin.ImageFileDirectory_v2()
    # The offsets of strips begin behind the directory.
    for tag, value in {**tags, 273: (0, size, 2 * size), 279: (size, size, size), 284: 2}.items():
        directory[tag] = value
    return b"II*\0" + struct.pack("<I", 8) + directory.tobytes(8) + pixels


def options_of_jpeg() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "", {}
    yield " turned", {"exif": TURNED}
    yield " progressive", {"progressive": True}
    yield " progressive 4:4:4", {"progressive": True, "subsampling": 0, "exif": TURNED}


@pytest.mark.parametrize(
    ("width", "height", "size", "edge", "longest"),
    [
        (2000, 1500, 320, 0, 0),
        (900, 700, 384, 0, 0),
        (3000, 60, 224, 224, 0),
        (200, 4000, 96, 0, 0),
        (300, 200, 512, 0, 2048),
    ],
    ids=["large", "not drafted", "wide, by its shorter edge", "tall", "resized twice"],
)
def test_nothing_takes_more_than_was_estimated(
    tmp_path: Path, width: int, height: int, size: int, edge: int, longest: int
) -> None:
    cases = dict(pictures(width, height))
    asked = []
    for number, data in enumerate(cases.values()):
        file = tmp_path / str(number)
        file.write_bytes(data)
        asked.append((str(file), size, edge, longest))
    done = python("-c", PROGRAM, stdin=json.dumps(asked), timeout=600)
    found = json.loads(done.stdout) if done.returncode == 0 else done.stderr
    assert len(found) == len(cases), found
    for name, (estimate, taken, length, error) in zip(cases, found, strict=True):
        assert not error, name
        assert taken <= estimate + SLACK, (name, estimate, taken)
        # And no more than what the dearest picture of its size and format takes, which is turned and see-through.
        dearest = ("png turned RGBA", "webp see-through", "jpeg CMYK progressive 4:4:4")
        if width * height > 1 << 20 and name in dearest:
            assert estimate < 1.5 * taken + 3 * length, (name, estimate, taken)


def test_a_header_is_refused_before_memory_is_taken() -> None:
    data = flat_webp(8000, 6000)
    assert len(data) == 34
    with pytest.raises(NeedsMemory) as needs:
        ImageTransform((96, 96)).decode(data, 1 << 29)
    assert needs.value.size > 8000 * 6000 * 16


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
def test_what_fits_is_decoded(kind: str) -> None:
    data = encoded(scene(300, 200), kind)
    transform = ImageTransform((96, 96))
    with pytest.raises(NeedsMemory) as needs:
        transform.decode(data, 1000)
    assert transform.decode(data, needs.value.size).format == kind.lower()
    with pytest.raises(NeedsMemory):
        transform.decode(data, needs.value.size - 1)


def test_a_thin_picture_is_not_resized_to_a_huge_one() -> None:
    """To 96 × 3,000,000 pixels on the way to 96 × 96, and to 224 × 1,467,900 by its shorter edge."""
    with pytest.raises(ImageError, match="a side of more than 65535") as error:
        ImageTransform((96, 96)).decode(flat_png("RGB", 4, 3_000_000))
    assert error.value.reason == "too_large"
    edge = ImageTransform((224, 224), resize_to=224, do_center_crop=True)
    with pytest.raises(NeedsMemory) as needs:
        edge.decode(flat_png("L", 10, 65_000), 1 << 30)
    assert needs.value.size > 224 * 1_450_000 * 4


def test_a_flat_webp_of_a_few_bytes_opens_as_what_it_says() -> None:
    assert Image.open(io.BytesIO(flat_webp(500, 400))).size == (500, 400)
