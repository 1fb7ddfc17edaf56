"""A picture is never refused for what only describes it: profiles, texts, EXIF, previews, and damage to these."""

import struct
import zlib

import pytest
from PIL import Image, PngImagePlugin
from support.attacks.attack_pictures import chunk, packed_text, segment, with_chunks, with_segments
from support.parity.pictures import encoded, scene

from snapcap.models.processing.image_formats import ImageError
from snapcap.models.processing.transform import ImageTransform

MIB = 1 << 20
TRANSFORM = ImageTransform((70, 90))
PICTURE = scene(90, 70)
TURNED = Image.Exif()
TURNED[0x0112] = 3
PNG, JPEG = encoded(PICTURE), encoded(PICTURE, "JPEG")
WRONG = b"\xde\xad\xbe\xef"  # a checksum


def wrong(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + WRONG


def text(size: int, packed: bool) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "a" * size, zip=packed)
    return encoded(PICTURE, pnginfo=info)


PNGS = {
    "profile above 1 MiB": with_chunks(PNG, chunk(b"iCCP", b"icc\0\0" + zlib.compress(bytes(3 * MIB)))),
    "profile that is none": with_chunks(PNG, chunk(b"iCCP", b"icc\0\0" + b"\xff" * 99)),
    "text above 1 MiB": text(3 * MIB, packed=False),
    "packed text above 1 MiB": text(3 * MIB, packed=True),
    "texts above 64 MiB": with_chunks(PNG, *(packed_text(number) for number in range(200))),
    "17 plain texts": with_chunks(PNG, *(chunk(b"iTXt", b"k%d\0\0\0\0\0abc" % number) for number in range(17))),
    "text of no parts": with_chunks(PNG, chunk(b"iTXt", b"k"), chunk(b"zTXt", b""), chunk(b"tEXt", b"")),
    "text of another packing": with_chunks(PNG, chunk(b"zTXt", b"k\0\7abc")),
    "gamma, colours, bits and size": with_chunks(
        PNG,
        chunk(b"gAMA", b"\0"),
        chunk(b"cHRM", b"ab"),
        chunk(b"sBIT", b""),
        chunk(b"pHYs", b"\1"),
        chunk(b"sRGB", b""),
    ),
    "wrong checksums": with_chunks(
        PNG, wrong(b"gAMA", bytes(4)), wrong(b"eXIf", b"II*\0"), wrong(b"tIME", bytes(7)), wrong(b"iCCP", b"a\0\0b")
    ),
    "EXIF that is none": with_chunks(PNG, chunk(b"eXIf", b"II*\0\xff\xff\xff\xff" + bytes(99))),
    "EXIF as text that is none": with_chunks(PNG, chunk(b"zTXt", b"Raw profile type exif\0\0" + bytes(9))),
    "EXIF as text above 1 MiB": with_chunks(
        PNG, chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(bytes(3 * MIB)))
    ),
    "XMP above 1 MiB": with_chunks(PNG, chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + b"a" * 2 * MIB)),
    "an animation of frames that are none": with_chunks(
        PNG, chunk(b"acTL", b"\0\0\0\2\0\0\0\0"), chunk(b"fcTL", b"a")
    ),
    "an animation without frames": with_chunks(PNG, chunk(b"acTL", bytes(8))),
    "private chunks": with_chunks(PNG, chunk(b"prVt", b"a" * MIB), chunk(b"abCd", b"")),
}
JPEGS = {
    "profile without numbers": with_segments(JPEG, segment(0xE2, b"ICC_PROFILE\0")),
    "profile in the wrong number of parts": with_segments(JPEG, segment(0xE2, b"ICC_PROFILE\0\1\7" + bytes(50))),
    "profile above 16 MiB": with_segments(
        JPEG,
        *(
            segment(0xE2, b"ICC_PROFILE\0" + bytes((number % 255 + 1, 255)) + bytes(65_000))
            for number in range(270)
        ),
    ),
    "pictures that are not there": with_segments(JPEG, segment(0xE2, b"MPF\0MM\0*\0\0\0\x08\0\0" + b"\xff" * 40)),
    "pictures in a directory without a number": with_segments(
        JPEG, segment(0xE2, b"MPF\0II*\0\x08\0\0\0\0\0\0\0\0\0")
    ),
    "Photoshop's": with_segments(JPEG, segment(0xED, b"Photoshop 3.0\x008BIM\3\xed\0\0\0\0\xff\xff")),
    "EXIF that is none": with_segments(JPEG, segment(0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff" + b"\xff" * 60_000)),
    "EXIF without a resolution": with_segments(JPEG[:2] + JPEG[20:], segment(0xE1, b"Exif\0\0MM\0*\0\0\0\x08\0\1")),
    "XMP that is none": with_segments(JPEG, segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0\xff\xfe<")),
    "comments": with_segments(JPEG, *(segment(0xFE, b"a" * 65_000) for _ in range(100))),
    "segments of every number": with_segments(JPEG, *(segment(number, b"?") for number in range(0xE1, 0xEE))),
    "Adobe's of one byte": with_segments(JPEG, segment(0xEE, b"A")),
    "Adobe's that is cut": with_segments(JPEG, segment(0xEE, b"Adobe\0")),
    "JFIF that is cut": with_segments(JPEG[:2] + JPEG[20:], segment(0xE0, b"JFIF\0")),
}


@pytest.mark.parametrize("data", PNGS.values(), ids=PNGS.keys())
def test_a_png_is_read_as_without(data: bytes) -> None:
    assert (TRANSFORM.decode(data).pixels == TRANSFORM.decode(PNG).pixels).all()


@pytest.mark.parametrize("data", JPEGS.values(), ids=JPEGS.keys())
@pytest.mark.filterwarnings("ignore")  # Pillow's, of an EXIF block
def test_a_jpeg_is_read_as_without(data: bytes) -> None:
    assert (TRANSFORM.decode(data).pixels == TRANSFORM.decode(JPEG).pixels).all()


def test_a_webp_is_read_as_without() -> None:
    plain = TRANSFORM.decode(encoded(PICTURE, "WEBP")).pixels
    for more in ({"exif": b"Exif\0\0II*\0\xff"}, {"xmp": b"\xff" * 2 * MIB}, {"icc_profile": bytes(3 * MIB)}):
        assert (TRANSFORM.decode(encoded(PICTURE, "WEBP", **more)).pixels == plain).all()


def test_a_webp_that_lacks_only_its_end_is_read() -> None:
    """A description behind the picture, or the byte that pads the picture. The picture itself is whole."""
    data = encoded(PICTURE, "WEBP", xmp=b"<x>" * 999)
    wanted = TRANSFORM.decode(data).pixels
    for left in (len(data) - 1, len(data) - 2000, data.index(b"XMP ") + 9, data.index(b"XMP ") + 3):
        assert (TRANSFORM.decode(data[:left]).pixels == wanted).all(), left
    with pytest.raises(ImageError, match="incomplete or damaged"):
        TRANSFORM.decode(data[: data.index(b"XMP ") - 20])
    files = (encoded(scene(90, 70, seed), "WEBP", lossless=True) for seed in range(99))
    odd = next(each for each in files if each[16] & 1)
    assert (TRANSFORM.decode(odd[:-1]).pixels == TRANSFORM.decode(odd).pixels).all()


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "AVIF", "BMP"])
def test_rarer_formats_are_read_as_without(kind: str) -> None:
    many = {
        "GIF": {"comment": b"a" * 2 * MIB},
        "TIFF": {"icc_profile": b"\xff" * 2 * MIB, "description": "a" * 2 * MIB},
        "AVIF": {"icc_profile": encoded_profile(), "xmp": b"<" * MIB},
        "BMP": {"dpi": (0, 0)},
    }[kind]
    plain = TRANSFORM.decode(encoded(PICTURE, kind)).pixels
    assert (TRANSFORM.decode(encoded(PICTURE, kind, **many)).pixels == plain).all()


def encoded_profile() -> bytes:
    from PIL import ImageCms

    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def test_what_says_how_a_picture_is_turned_is_kept() -> None:
    """In EXIF, in XMP, and in EXIF as text, beside what is left out."""
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><d tiff:Orientation="3"/></x:xmpmeta>'
    hexadecimal = b"\nexif\n      32\n" + (b"Exif\0\0" + TURNED.tobytes()[6:]).hex().encode() + b"\n"
    heavy = chunk(b"iCCP", b"icc\0\0" + zlib.compress(bytes(3 * MIB)))
    pngs = [
        with_chunks(encoded(PICTURE, exif=TURNED), heavy),
        with_chunks(PNG, heavy, chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)),
        with_chunks(PNG, heavy, chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(hexadecimal))),
    ]
    jpegs = [
        with_segments(encoded(PICTURE, "JPEG", exif=TURNED), segment(0xE2, b"ICC_PROFILE\0")),
        with_segments(JPEG, segment(0xE2, b"?"), segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp)),
    ]
    for plain, files in ((PNG, pngs), (JPEG, jpegs)):
        for data in files:
            assert (TRANSFORM.decode(data).pixels == TRANSFORM.decode(plain).pixels[::-1, ::-1]).all()
