"""A JPEG that lacks only its end marker is read as the whole one; one that lacks more is refused."""

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from support.attacks.attack_pictures import scan_ends
from support.parity.pictures import encoded, scene

from snapcap.models.processing.image_formats import ImageError
from snapcap.models.processing.transform import ImageTransform

TRANSFORM = ImageTransform((60, 60))
PICTURES = {
    "photo": scene(90, 70),
    "blocks that are not whole": scene(61, 43),
    "white": Image.new("RGB", (90, 70), "white"),
    "grey": scene(90, 70).convert("L"),
    "cmyk": scene(90, 70).convert("CMYK"),
    "decoded at a fraction": scene(1200, 900),
}
OPTIONS = {
    "baseline": {},
    "progressive": {"progressive": True},
    "tables of its own": {"optimize": True},
    "a restart for each block": {"restart_marker_blocks": 1},
    "a restart for each row": {"restart_marker_rows": 1},
}


def read_or_none(data: bytes) -> NDArray[np.uint8] | None:
    try:
        return TRANSFORM.decode(data).pixels
    except ImageError:
        return None


@pytest.fixture(params=[(name, options) for name in PICTURES for options in OPTIONS], ids=" ".join)
def jpeg(request: pytest.FixtureRequest) -> bytes:
    name, options = request.param
    return encoded(PICTURES[name], "JPEG", quality=90, **OPTIONS[options])


def test_without_its_end_marker(jpeg: bytes) -> None:
    whole = TRANSFORM.decode(jpeg).pixels
    for cut in (jpeg[:-1], jpeg[:-2], jpeg[:-2] + b"\xff\xff"):
        assert (TRANSFORM.decode(cut).pixels == whole).all()


def test_one_that_is_cut_is_refused(jpeg: bytes) -> None:
    """Or comes out as the whole one, where its last bits are no part of any pixel."""
    whole = TRANSFORM.decode(jpeg).pixels
    for left in [len(jpeg) - cut for cut in range(3, 40)] + [len(jpeg) * part // 10 for part in range(1, 10)]:
        pixels = read_or_none(jpeg[:left])
        assert pixels is None or ((pixels == whole).all() and len(jpeg) - left < 12), len(jpeg) - left
    assert read_or_none(jpeg[:-12]) is None


def test_a_file_whose_space_was_reserved() -> None:
    jpeg = encoded(scene(90, 70), "JPEG")
    whole = TRANSFORM.decode(jpeg).pixels
    assert (TRANSFORM.decode(jpeg[:-2] + bytes(5000)).pixels == whole).all()
    with pytest.raises(ImageError, match="incomplete or damaged"):
        TRANSFORM.decode(jpeg[: len(jpeg) // 2] + bytes(5000))


def test_one_that_is_cut_between_two_scans_is_refused() -> None:
    jpeg = encoded(scene(90, 70), "JPEG", progressive=True)
    *ends, last = scan_ends(jpeg)
    for end in ends:
        with pytest.raises(ImageError, match="incomplete or damaged"):
            TRANSFORM.decode(jpeg[:end])
    assert (TRANSFORM.decode(jpeg[:last]).pixels == TRANSFORM.decode(jpeg).pixels).all()


def test_one_in_several_parts_of_one_component_each() -> None:
    """Cut behind the first component."""
    jpeg = encoded(scene(90, 70).convert("L"), "JPEG")
    frame = jpeg.index(b"\xff\xc0")
    three = (
        jpeg[:frame]
        + bytes((0xFF, 0xC0, 0, 17))
        + jpeg[frame + 4 : frame + 9]
        + b"\3"
        + b"\1\x11\0\2\x11\0\3\x11\0"
    )
    rest = jpeg[frame + 13 : -2]
    scan = rest[rest.index(b"\xff\xda") :]
    others = b"".join(scan[:5] + bytes([number]) + scan[6:] for number in (2, 3))
    whole = TRANSFORM.decode(three + rest + others + b"\xff\xd9").pixels
    assert np.ptp(whole) > 50
    assert (TRANSFORM.decode(three + rest + others).pixels == whole).all()
    with pytest.raises(ImageError, match="incomplete or damaged"):
        TRANSFORM.decode(three + rest)
