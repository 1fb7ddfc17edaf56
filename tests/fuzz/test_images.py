"""Mutated pictures: each is decoded into pixels of the right shape, or refused with an `ImageError`."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.attacks.fuzzing import corpus, fuzzed
from support.attacks.mutations import mutated

from snapcap.models.processing.image import ImageError
from snapcap.models.processing.transform import ImageTransform

MAX_PIXELS = 1_000_000
SEEDS = corpus("images")
MARKS = (
    *(b"IHDR", b"PLTE", b"IDAT", b"IEND", b"tRNS", b"acTL", b"fcTL", b"fdAT", b"zTXt", b"iTXt", b"iCCP", b"eXIf"),
    *(
        b"\xff\xd8",
        b"\xff\xc0",
        b"\xff\xc2",
        b"\xff\xc4",
        b"\xff\xda",
        b"\xff\xdb",
        b"\xff\xdd",
        b"\xff\xe1",
        b"\xff\xd9",
    ),
    *(b"RIFF", b"WEBP", b"VP8 ", b"VP8L", b"VP8X", b"ANIM", b"ANMF", b"ALPH", b"EXIF", b"ICCP"),
    *(b"Exif\0\0II*\0", b"MPF\0MM\0*", b"Adobe\0d"),
)
TRANSFORM = ImageTransform(size=(16, 16), max_pixels=MAX_PIXELS)


def decode(data: bytes) -> bool:
    """Whether it is read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of damage that it survives
        try:
            decoded = TRANSFORM.decode(data)
        except ImageError:
            return False
    assert decoded.pixels.shape == (16, 16, 3)
    assert decoded.pixels.dtype == np.uint8
    return True


@pytest.mark.parametrize("number", range(len(SEEDS)))
def test_corpus(number: int) -> None:
    decode(SEEDS[number])


def test_the_seeds_are_read() -> None:
    """A fuzzer whose seeds are refused at the door would find nothing behind it."""
    assert sum(decode(data) for data in SEEDS) >= 12


@fuzzed(1_500)
@given(mutated(SEEDS, MARKS))
def test_mutated(data: bytes) -> None:
    decode(data)


@fuzzed(300)
@given(st.sampled_from((b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP")), st.binary(max_size=500))
def test_random(beginning: bytes, rest: bytes) -> None:
    decode(beginning + rest)
