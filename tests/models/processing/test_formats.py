"""What a file is, whatever it is called, and that a format which is not read is named with those that are."""

import base64
import gzip
import re
import struct

import pytest
from PIL import Image
from support.attacks.attack_pictures import chunk
from support.attacks.hostile_images import zipped
from support.parity.pictures import encoded, scene

from snapcap.models.processing import image_formats
from snapcap.models.processing.image import load_codecs
from snapcap.models.processing.image_formats import (
    HEAD_BYTES,
    TAIL_BYTES,
    ImageError,
    is_readable,
    kind_of,
    readable,
)
from snapcap.models.processing.transform import ImageTransform

TRANSFORM = ImageTransform((32, 32))
SMALL = scene(40, 30)
JPEG = encoded(SMALL, "JPEG")
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'


def jpeg_frame(marker: int, bits: int = 8, components: int = 3) -> bytes:
    """A JPEG with another start of frame."""
    at = JPEG.index(b"\xff\xc0")
    return (
        JPEG[:at]
        + bytes((0xFF, marker, 0, 17, bits))
        + JPEG[at + 5 : at + 9]
        + bytes([components])
        + JPEG[at + 10 :]
    )


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content) + 8) + kind + content


def tiff(*entries: tuple[int, int, int]) -> bytes:
    """A TIFF of one directory: (tag, kind, value)."""
    packed = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in sorted(entries))
    return struct.pack("<2sHIH", b"II", 42, 8, len(entries)) + packed + bytes(600)


SIZE = ((256, 3, 8), (257, 3, 8), (258, 3, 8), (273, 4, 100), (277, 3, 1), (278, 3, 8), (279, 4, 64))
UNREAD = {
    "12-bit JPEG": jpeg_frame(0xC1, bits=12),
    "16-bit JPEG": jpeg_frame(0xC3 - 2, bits=16),
    "lossless JPEG": jpeg_frame(0xC3),
    "lossless JPEG ": jpeg_frame(0xCB),
    "hierarchical JPEG": jpeg_frame(0xC5),
    "JPEG-LS": jpeg_frame(0xF7),
    "JPEG images of 2 components": jpeg_frame(0xC0, components=2),
    "JPEG images that have their height behind their pixels": re.sub(
        rb"(?<=\xff\xc0\0\x11\x08)..", b"\0\0", JPEG, count=1, flags=re.DOTALL
    )
    + b"\xff\xdc\0\4\0\7",
    "JPEG XL": b"\xff\x0a" + bytes(50),
    "JPEG XL ": box(b"JXL ", b"\r\n\x87\n") + box(b"ftyp", b"jxl \0\0\0\0jxl "),
    "JPEG 2000": b"\xff\x4f\xff\x51\0\x2f" + bytes(50),
    "JPEG 2000 ": encoded(SMALL, "JPEG2000"),
    "JPEG XR": b"II\xbc\x01\x20\0\0\0",
    "ICO": encoded(SMALL, "ICO"),
    "PCX": encoded(SMALL, "PCX"),
    "SGI": encoded(SMALL, "SGI"),
    "Sun raster": b"\x59\xa6\x6a\x95" + bytes(60),
    "FLIF": b"FLIF" + bytes(60),
    "farbfeld": b"farbfeld" + bytes(60),
    "PPM": encoded(SMALL, "PPM"),
    "PGM": encoded(SMALL.convert("L"), "PPM"),
    "PBM": b"P1\n2 2\n0 1 1 0\n",
    "PAM": b"P7\nWIDTH 2\nHEIGHT 2\nDEPTH 1\nMAXVAL 255\nENDHDR\nabcd",
    "PFM": encoded(SMALL.convert("F"), "PPM"),
    "Photoshop (PSD)": b"8BPS\0\1" + bytes(60),
    "BigTIFF": encoded(SMALL, "TIFF", big_tiff=True),
    "BigTIFF ": b"MM\0+\0\x08\0\0" + bytes(40),
    "SVG": SVG,
    "SVG behind a prolog": b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- made by hand -->\n<!DOCTYPE svg>\n' + SVG,
    "SVG behind white space": b"\n\n   \t" + SVG,
    "SVG in UTF-16": SVG.decode().encode("utf-16"),
    "SVG behind a long comment": b"<!--" + b" " * 5000 + b"-->" + SVG,
    "camera RAW": tiff(*SIZE, (50706, 1, 4)),
    "camera RAW of a thumbnail": tiff(*SIZE, (254, 4, 1), (330, 4, 200)),
    "camera RAW of a filter": tiff(*SIZE, (262, 3, 32803)),
    "camera RAW of Canon": box(b"ftyp", b"crx \0\0\0\1crx isom"),
    "camera RAW of Fuji": b"FUJIFILMCCD-RAW 0201",
    "OpenEXR": b"\x76\x2f\x31\x01\2\0\0\0",
    "QOI": encoded(SMALL, "QOI"),
    "TGA": encoded(SMALL, "TGA"),
    "TGA of old": encoded(SMALL, "TGA")[:-26],
    "DDS": encoded(SMALL, "DDS"),
    "Radiance HDR": b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n",
    "TIFF images with old JPEG": tiff(*SIZE, (259, 3, 6)),
    "TIFF images with LZMA": encoded(SMALL, "TIFF", compression="lzma"),
    "TIFF images with compression 50002": tiff(*SIZE, (259, 3, 50002)),
    "TIFF images in CIELAB colours": encoded(SMALL.convert("LAB"), "TIFF"),
    "TIFF images with 1 × 24 bits a pixel": tiff(*SIZE[:2], (258, 3, 24), *SIZE[3:]),
    "BMP images of compression 4": encoded(SMALL, "BMP")[:30] + b"\4\0\0\0" + encoded(SMALL, "BMP")[34:],
    "BMP images of 2 bits": encoded(SMALL, "BMP")[:28] + b"\2\0" + encoded(SMALL, "BMP")[30:],
    "PNG images that were changed for iPhone apps (CgBI)": encoded(SMALL)[:8]
    + chunk(b"CgBI", bytes(4))
    + encoded(SMALL)[8:],
    "HEIF that is neither AVIF nor HEIC": box(b"ftyp", b"mif1\0\0\0\0mif1vvic"),
}
NO_PICTURES = {
    "an HTML page": b"\n<!DOCTYPE html>\n<html><body>Not found</body></html>",
    "an HTML page in capitals": b"<HTML><HEAD><TITLE>403</TITLE>",
    "an HTML page with a drawing": b"<!-- a --><html><body>" + SVG,
    "gzip data": gzip.compress(JPEG),
    "a PDF document": b"%PDF-1.7\n",
    "a ZIP archive": zipped(),
    "an MP4 or QuickTime video": box(b"ftyp", b"isom\0\0\2\0isomiso2avc1mp41"),
    "an MP4 or QuickTime video ": box(b"ftyp", b"qt  \0\0\2\0qt  "),
    "an MP4 or QuickTime video of old": box(b"moov", bytes(8)),
    "a WebM or Matroska video": b"\x1a\x45\xdf\xa3" + bytes(30),
    "an AVI video": b"RIFF\0\0\0\0AVI LIST",
    "base64 text": base64.b64encode(JPEG),
    "base64 text of a PNG": base64.b64encode(encoded(SMALL)),
    "base64 text of a GIF": base64.b64encode(encoded(SMALL, "GIF")),
    "base64 text of a WEBP": base64.b64encode(encoded(SMALL, "WEBP")),
    "a data URI": b"data:image/jpeg;base64," + base64.b64encode(JPEG),
    "an encoded form": b"image=%2F9j%2F",
}


@pytest.mark.parametrize(("name", "data"), UNREAD.items(), ids=UNREAD.keys())
def test_what_is_not_read_is_named_with_what_is(name: str, data: bytes) -> None:
    with pytest.raises(ImageError) as error:
        TRANSFORM.decode(data)
    assert error.value.reason == "unsupported_format"
    short = re.split(" behind | in UTF| of a | of C| of F| of old", name)[0].strip()
    assert str(error.value).startswith(short), str(error.value)
    assert str(error.value).endswith(f"are not read; send {readable()}")


@pytest.mark.parametrize(("name", "data"), NO_PICTURES.items(), ids=NO_PICTURES.keys())
def test_what_is_no_picture_is_named(name: str, data: bytes) -> None:
    with pytest.raises(ImageError) as error:
        TRANSFORM.decode(data)
    assert error.value.reason == "not_an_image"
    short = re.split(" in | with a d| of old| of a ", name)[0].strip()
    assert str(error.value) == f"the data is {short}, not an image; send {readable()}"


@pytest.mark.parametrize("data", [b"hello", b"BM, as in a letter", b"P6x", b"<note/>", b"II", b"\0" * 99, b"ftyp"])
def test_what_is_not_known_is_said_so(data: bytes) -> None:
    with pytest.raises(ImageError, match="the data is not an image; send JPEG, PNG"):
        TRANSFORM.decode(data)


def test_the_ends_of_a_file_tell_what_it_is() -> None:
    large = Image.effect_noise((300, 300), 90).convert("RGB")
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "TGA", "PPM", "ICO"):
        data = encoded(large, kind)
        assert kind_of(data[:HEAD_BYTES] + data[-TAIL_BYTES:]) == kind_of(data) is not None, kind


def test_what_is_not_installed_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Pillow without libavif, and a Python without pillow-heif."""
    monkeypatch.setattr(image_formats, "_is_installed", lambda name: False)
    assert readable() == "JPEG, PNG, WEBP, GIF, BMP or TIFF"
    assert not is_readable("heic")
    heic = box(b"ftyp", b"heic\0\0\0\0mif1heic")
    for name, data in (("AVIF", encoded(SMALL, "AVIF")), ("HEIC", heic)):
        with pytest.raises(
            ImageError, match=f"^{name} images are not read; send JPEG, PNG, WEBP, GIF, BMP or TIFF$"
        ):
            TRANSFORM.decode(data)


def test_once_codecs_are_loaded_no_file_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that decodes images may open no file: on Linux it ended at the first unknown format."""

    def denied(name: str) -> None:
        raise PermissionError(name)

    image_formats._is_installed.cache_clear()
    load_codecs()
    monkeypatch.setattr(image_formats, "find_spec", denied)
    assert readable().startswith("JPEG, PNG")
    with pytest.raises(ImageError, match="PPM"):
        TRANSFORM.decode(b"P6\n1 1\n255\n\0\0\0")
