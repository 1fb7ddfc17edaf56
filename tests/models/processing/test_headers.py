"""Files whose parts cost more than their pixels are refused before a codec sees them, and others are not."""

import io
import zlib
from collections.abc import Callable

import pytest
from PIL import Image
from support.attacks.attack_pictures import (
    chunk,
    flat_webp,
    many_scans,
    packed_text,
    scan_ends,
    segment,
    with_chunks,
    with_segments,
)
from support.parity.pictures import encoded, scene

from snapcap.models.processing.headers import (
    MOST_PARTS,
    MOST_SCANS,
    _unpacks,
    check_scans,
    read_jpeg,
    webp_size,
)
from snapcap.models.processing.image_formats import ImageError
from snapcap.models.processing.transform import ImageTransform

TRANSFORM = ImageTransform((32, 32))
JPEG = encoded(scene(90, 70), "JPEG")
PROGRESSIVE = encoded(scene(90, 70), "JPEG", progressive=True)
PNG = encoded(scene(90, 70))
FRAME = chunk(b"ANMF", b"")[4:8] + bytes(4)

# Made in the tests: a worker collects all files, also those that another one runs.
BAD: dict[str, Callable[[], bytes]] = {
    "scans": lambda: many_scans(90, 70, MOST_SCANS + 1),
    "scans of a large picture": lambda: many_scans(8000, 6000, 21),
    "segments": lambda: with_segments(JPEG, segment(0xE5, b"") * MOST_PARTS),
    "chunks": lambda: with_chunks(PNG, chunk(b"abCd", b"") * MOST_PARTS),
    "empty chunks of pixels": lambda: with_chunks(PNG, chunk(b"IDAT", b"") * MOST_PARTS),
    "frames": lambda: flat_webp(20, 20) + FRAME * MOST_PARTS,
}


@pytest.mark.parametrize("name", BAD)
def test_too_many_parts_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(image: Image.Image) -> None:
        raise AssertionError("a codec was given it")

    data = BAD[name]()
    monkeypatch.setattr(Image.Image, "load", load)
    with pytest.raises(ImageError, match=r"more than .* takes too long to decode; save it") as error:
        TRANSFORM.decode(data)
    assert error.value.reason == "too_complex"


GOOD: dict[str, Callable[[], bytes]] = {
    "as many scans as are allowed": lambda: many_scans(90, 70, MOST_SCANS),
    "mozjpeg's scans at 50 million pixels": lambda: many_scans(8000, 6000, 20),
    "a preview with scans": lambda: with_segments(JPEG, *[segment(0xE1, b"Exif\0\0" + b"\xff\xda" * 9000)] * 3),
    "a film behind the picture": lambda: JPEG + b"\xff\xda" * 100_000,
    "restarts": lambda: encoded(scene(90, 70), "JPEG", restart_marker_blocks=1),
    "texts": lambda: with_chunks(PNG, *(packed_text(number) for number in range(600))),
}


@pytest.mark.parametrize("name", GOOD)
def test_others_are_decoded(name: str) -> None:
    assert TRANSFORM.decode(GOOD[name]()).pixels.shape == (32, 32, 3)


def test_each_scan_is_counted_and_nothing_else() -> None:
    assert check_scans(JPEG, 6300) == 1
    assert check_scans(PROGRESSIVE, 6300) == len(scan_ends(PROGRESSIVE)) == 10
    assert check_scans(with_segments(PROGRESSIVE, segment(0xE1, b"\xff\xda" * 50)), 6300) == 10
    assert check_scans(many_scans(90, 70, 77), 6300) == 77


@pytest.mark.parametrize("hidden", [b"\xff\x02\x7f\x10", b"\xff\xd8\x7f\x10", b"\xff\x01\x7f\x10"])
def test_no_scan_hides_behind_what_has_no_length(hidden: bytes) -> None:
    """Where libjpeg reads on behind a marker, so does the count: these have no length to step over."""
    ends = scan_ends(PROGRESSIVE)
    data = PROGRESSIVE[: ends[3]] + hidden + PROGRESSIVE[ends[3] :]
    assert check_scans(data, 6300) >= 10


def test_bytes_between_segments_are_few() -> None:
    with pytest.raises(ImageError, match="damaged"):
        read_jpeg(JPEG[:2] + bytes(200_000) + JPEG[2:])
    read_jpeg(JPEG[:2] + bytes(20) + JPEG[2:])


def test_bytes_behind_the_last_segment_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow skips them one at a time, 14 MB in ten seconds."""
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("a codec was given it"))
    for head in (JPEG[:2], JPEG[:20]):
        with pytest.raises(ImageError) as error:
            TRANSFORM.decode(head + b"\xff\x00" * 40_000)
        assert error.value.reason == "truncated"


@pytest.mark.parametrize("cut", [0, 6])
def test_few_compressed_texts_are_unpacked(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = 0

    def unpacks(packed: bytes) -> bool:
        nonlocal unpacked
        unpacked += 1
        return _unpacks(packed)

    monkeypatch.setattr("snapcap.models.processing.headers._unpacks", unpacks)
    packed = zlib.compress(b"\n" * 1_000_000)
    text = chunk(b"zTXt", b"Raw profile type exif\0\0" + packed[: len(packed) - cut])
    TRANSFORM.decode(with_chunks(PNG, *[text] * 600))
    assert unpacked <= 8


@pytest.mark.parametrize("size", [(1, 1), (257, 513), (16383, 3)])
def test_the_size_of_a_webp_is_what_pillow_finds(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (1, 2, 3))
    exif = Image.Exif()
    exif[0x0112] = 3
    for options in ({}, {"lossless": True}, {"exif": exif}):
        data = encoded(image, "WEBP", **options)
        assert webp_size(data) == Image.open(io.BytesIO(data)).size == size
    assert webp_size(data[:25]) is None
    assert webp_size(b"RIFF....WEBPABCD" + bytes(50)) is None
