"""One colour of a PNG is transparent: at every depth and kind it is white, and no other colour is."""

import io
import struct
import zlib

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from support.attacks.attack_pictures import chunk, with_chunks, with_key
from support.attacks.hostile_images import png
from support.parity.pictures import encoded, scene

from snapcap.models.processing.transform import ImageTransform

GREY, RGB, PALETTE = 0, 2, 3
WIDTH, HEIGHT = 24, 20


def packed(samples: NDArray[np.uint16], depth: int, colour: int) -> bytes:
    """A PNG of these samples, [rows, columns, samples of a pixel]."""
    bits = (samples.reshape(len(samples), -1, 1) >> np.arange(depth - 1, -1, -1)) & 1
    rows = np.packbits(bits.reshape(len(samples), -1).astype(np.uint8), axis=1)
    return png(
        samples.shape[1],
        samples.shape[0],
        zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)),
        depth,
        colour,
    )


def decoded(data: bytes) -> NDArray[np.uint8]:
    return ImageTransform((HEIGHT, WIDTH)).decode(data).pixels


@pytest.mark.parametrize(
    ("depth", "colour"), [(1, GREY), (2, GREY), (4, GREY), (8, GREY), (16, GREY), (8, RGB), (16, RGB)]
)
def test_the_transparent_colour_is_white(depth: int, colour: int) -> None:
    most = (1 << depth) - 1
    samples = np.random.default_rng(depth).integers(0, most + 1, (HEIGHT, WIDTH, 3 if colour == RGB else 1))
    samples = samples.astype(np.uint16)
    samples[::2] = key = samples[0, 0] if depth > 1 else np.zeros(1, np.uint16)
    samples[1, 0] = key ^ 1  # the nearest colour, whose upper byte is the same in 16 bits, is opaque
    data = packed(samples, depth, colour)
    plain = decoded(data)
    wide = samples.astype(int)
    shades = wide >> 8 if depth == 16 else wide * 255 // most
    assert (plain == shades).all(), "without a transparent colour"
    clear = (samples == key).all(axis=2)
    assert clear.mean() >= 0.5
    assert not clear[1, 0]
    pixels = decoded(with_key(data, *key.tolist()))
    assert (pixels[clear] == 255).all()
    assert (pixels[~clear] == plain[~clear]).all()


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_transparent_entries_of_a_palette(depth: int) -> None:
    samples = (np.arange(HEIGHT * WIDTH, dtype=np.uint16) % 2).reshape(HEIGHT, WIDTH, 1)
    data = with_chunks(packed(samples, depth, PALETTE), chunk(b"PLTE", bytes((9, 8, 7, 0, 0, 200))))
    pixels = decoded(data[: data.index(b"PLTE") + 14] + chunk(b"tRNS", b"\0") + data[data.index(b"PLTE") + 14 :])
    assert (pixels[samples[..., 0] == 0] == 255).all()
    assert (pixels[samples[..., 0] == 1] == (0, 0, 200)).all()


def test_bits_above_the_depth_do_not_count() -> None:
    """Some programs write 8 bits twice."""
    image = Image.new("L", (WIDTH, HEIGHT), 7)
    assert (decoded(with_key(encoded(image), 0x0707)) == 255).all()


def test_an_interlaced_picture() -> None:
    """And one of more rows than are brought to RGB at a time."""
    transform = ImageTransform((1200, 1000))
    grey = (np.arange(1200 * 1000, dtype=np.uint32) * 7 % 65536).astype(np.uint16).reshape(1200, 1000)
    data = with_key(encoded(Image.fromarray(grey)), 700)
    pixels = transform.decode(data).pixels
    assert ((pixels[..., 0] == 255) == ((grey == 700) | (grey >> 8 == 255))).all()


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 5, b"\0" * 300])
def test_one_that_is_none_is_passed_over(content: bytes) -> None:
    for mode in ("L", "RGB", "LA", "RGBA"):
        data = encoded(scene(WIDTH, HEIGHT).convert(mode))
        assert (decoded(with_chunks(data, chunk(b"tRNS", content))) == decoded(data)).all()


def test_a_wrong_checksum_is_passed_over() -> None:
    data = encoded(Image.new("L", (WIDTH, HEIGHT), 7))
    wrong = struct.pack(">I", 2) + b"tRNS" + b"\0\7" + b"\0\0\0\0"
    assert (decoded(with_chunks(data, wrong)) == 7).all()
    assert Image.open(io.BytesIO(data)).mode == "L"
