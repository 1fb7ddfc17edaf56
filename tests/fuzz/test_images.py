"""Mutated pictures: each is decoded into pixels of the right shape, or refused with an `ImageError`.

A decode process of a server, which may open no file, makes the same of each as a process that may.
"""

import os
import socket
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.attacks.fuzzing import corpus, fuzzed
from support.attacks.hostile_images import read, refused
from support.attacks.mutations import mutated
from support.servers.server_process import clean_environment

from snapcap.models.processing.image_formats import READ, ImageError, is_readable, sniff
from snapcap.models.processing.transform import ImageTransform
from snapcap.service.images.messages import HEAD, Answer, AnswerReader, Decoded, Refused
from snapcap.service.ipc.framing import RECEIVE_BYTES
from snapcap.service.ipc.shared_pixels import image_file

MAX_PIXELS = 1_000_000
SEEDS = corpus("images")
# Tags of a TIFF: size, bits, compression, colours, strips, samples, planes, predictor, tiles and the like.
TAGS = (256, 257, 258, 259, 262, 273, 274, 277, 278, 279, 284, 317, 320, 322, 323, 324, 325, 338, 339, 347, 530)
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
    *(b"Exif\0\0II*\0", b"MPF\0MM\0*", b"Adobe\0d", b"\xff\xc9", b"\xff\xca", b"\xff\xdd\0\4\0\1"),
    *(b"GIF89a", b"!\xf9\4\1\0\0\0\0", b"!\xfe\xff", b"!\xff\x0bNETSCAPE2.0", b",\0\0\0\0\x28\0\x1e\0", b"\0;"),
    *(b"BM", *(struct.pack("<I", size) for size in (12, 40, 56, 108, 124)), b"\0\2\xff\xff", b"\0\1", b"\xff\0"),
    *(struct.pack("<HHII", tag, kind, 1, value) for tag in TAGS for kind, value in ((3, 1), (4, 1 << 30))),
    *(struct.pack(">HHII", tag, 3, 1, 6 << 16) for tag in TAGS),
    *(
        b"ftypavif",
        b"ftypheic",
        b"ispe",
        b"pixi",
        b"av1C",
        b"hvcC",
        b"irot",
        b"imir",
        b"auxC",
        b"iloc",
        b"grid",
        b"clap",
    ),
)
HEADS = (b"GIF89a", b"BM" + bytes(12) + b"\x28\0\0\0", b"II*\0\x08\0\0\0", b"MM\0*", b"\0\0\0\x18ftypavif")
TRANSFORM = ImageTransform(size=(16, 16), max_pixels=MAX_PIXELS)
PATIENCE = 60.0
PROGRAM = f"""
import socket, sys
from snapcap.models.processing.image import load_codecs
from snapcap.models.processing.transform import ImageTransform
from snapcap.service.images.worker import decode_images
from snapcap.service.images.parent import picture
load_codecs()
transform = ImageTransform(size=(16, 16), max_pixels={MAX_PIXELS})
transform.decode(picture())
sys.exit(decode_images(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), 2, transform, 1 << 30))
"""


class Confined:
    """A decode process as a server has it, and the socket to it."""

    def __init__(self) -> None:
        self._end, theirs = socket.socketpair()
        self._end.settimeout(PATIENCE)
        self._file = image_file(TRANSFORM.size)
        files = (theirs.fileno(), self._file)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, *map(str, files)],
            env=clean_environment(),
            cwd=Path(__file__).parents[2],
            pass_fds=files,
        )
        theirs.close()
        self._answers = AnswerReader()

    def decode(self, data: bytes) -> tuple[Answer, bytes]:
        """The answer, and the pixels that are in the file."""
        self._end.sendall(HEAD.pack(len(data), 1 << 30) + data)
        while not (answers := self._answers.feed(self._end.recv(RECEIVE_BYTES))):
            pass
        return answers[0], os.pread(self._file, 16 * 16 * 3, 0)

    def close(self) -> None:
        self._end.close()
        os.close(self._file)
        assert self._process.wait(PATIENCE) == 0


@pytest.fixture(scope="module")
def confined() -> Iterator[Confined]:
    process = Confined()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as in the process
        yield process
    process.close()


def decode(data: bytes, confined: Confined) -> bool:
    """Whether it is read."""
    answer, pixels = confined.decode(data)
    decoded = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of damage that it survives
        try:
            decoded = TRANSFORM.decode(data)
        except ImageError as error:
            expected = Refused(error.reason, str(error))
    if decoded is None:
        assert answer == expected
        return False
    assert isinstance(answer, Decoded), answer
    assert decoded.pixels.tobytes() == pixels
    assert decoded.pixels.shape == (16, 16, 3)
    assert decoded.pixels.dtype == np.uint8
    return True


@pytest.mark.parametrize("number", range(len(SEEDS)))
def test_corpus(number: int, confined: Confined) -> None:
    decode(SEEDS[number], confined)


def test_the_seeds_are_read(confined: Confined) -> None:
    """A fuzzer whose seeds are refused at the door would find nothing behind it."""
    assert {sniff(data) for data in SEEDS} == set(READ)
    unread = [sniff(data) for data in SEEDS if not decode(data, confined)]
    assert set(unread) <= {label for label in READ if not is_readable(label)}


@fuzzed(3_000)
@given(mutated(SEEDS, MARKS))
def test_mutated(confined: Confined, data: bytes) -> None:
    decode(data, confined)


@fuzzed(300)
@given(
    st.sampled_from((b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP", *HEADS)),
    st.binary(max_size=500),
)
def test_random(confined: Confined, beginning: bytes, rest: bytes) -> None:
    decode(beginning + rest, confined)


@pytest.mark.parametrize("name", [*refused(), *read()])
def test_hostile(name: str, confined: Confined) -> None:
    decode({**refused(), **read()}[name], confined)
