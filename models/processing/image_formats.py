"""Recognises the format of a file by its bytes, whatever its name, and lists the formats that are read.

Names the ways in which an image cannot be read, too, each with a reason for metrics and a remedy. The module
imports no Pillow, because the HTTP process has none and needs both.
"""

import struct
from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple

# The formats that are read, by their labels in metrics and logs. HEIC needs pillow-heif.
READ = ("jpeg", "png", "webp", "gif", "bmp", "tiff", "avif", "heic")
MEDIA_TYPES = tuple(f"image/{label}" for label in READ)
# Modules that a format needs. A Pillow that was built without libavif lacks its module.
_MODULES = {"avif": "PIL._avif", "heic": "pillow_heif"}
_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)
# Bytes at a file's beginning and end that are enough to recognise its format. Only a drawing behind a very long
# comment needs more.
HEAD_BYTES, TAIL_BYTES = 4096, 18
_TEXT_HEAD = 65_536  # bytes in which a text must show its kind
TIFF_HEADS = (b"II*\0", b"MM\0*")


class Kind(NamedTuple):
    """A kind of file. ``name`` is its name in messages. ``picture`` tells that programs would show it as a
    picture."""

    label: str
    name: str
    picture: bool = True


_BY_LABEL = {label: Kind(label, label.upper()) for label in READ}
_SVG = Kind("svg", "SVG")
_VIDEO = Kind("video", "an MP4 or QuickTime video", picture=False)
_BASE64 = Kind("base64", "base64 text", picture=False)
_HTML = Kind("html", "an HTML page", picture=False)
# Offset, bytes at this offset, kind.
_SIGNATURES = (
    (0, b"\xff\xd8\xff", _BY_LABEL["jpeg"]),
    (0, b"\x89PNG\r\n\x1a\n", _BY_LABEL["png"]),
    (0, b"GIF87a", _BY_LABEL["gif"]),
    (0, b"GIF89a", _BY_LABEL["gif"]),
    *((0, head, _BY_LABEL["tiff"]) for head in TIFF_HEADS),
    (0, b"II+\0", Kind("bigtiff", "BigTIFF")),
    (0, b"MM\0+", Kind("bigtiff", "BigTIFF")),
    (0, b"\xff\x0a", Kind("jxl", "JPEG XL")),
    (0, b"\0\0\0\x0cJXL \r\n\x87\n", Kind("jxl", "JPEG XL")),
    (0, b"\xff\x4f\xff\x51", Kind("jp2", "JPEG 2000")),
    (0, b"\0\0\0\x0cjP  \r\n\x87\n", Kind("jp2", "JPEG 2000")),
    (0, b"II\xbc", Kind("jxr", "JPEG XR")),
    (0, b"8BPS", Kind("psd", "Photoshop (PSD)")),
    (0, b"gimp xcf", Kind("xcf", "GIMP (XCF)")),
    (0, b"\0\0\1\0", Kind("ico", "ICO")),
    (0, b"icns", Kind("icns", "ICNS")),
    (0, b"\x0a\x05\x01", Kind("pcx", "PCX")),
    (0, b"\x01\xda\0\1", Kind("sgi", "SGI")),
    (0, b"\x01\xda\1\1", Kind("sgi", "SGI")),
    (0, b"\x59\xa6\x6a\x95", Kind("sun", "Sun raster")),
    (0, b"FLIF", Kind("flif", "FLIF")),
    (0, b"farbfeld", Kind("farbfeld", "farbfeld")),
    (0, b"DDS ", Kind("dds", "DDS")),
    (0, b"\x76\x2f\x31\x01", Kind("exr", "OpenEXR")),
    (0, b"qoif", Kind("qoi", "QOI")),
    (0, b"#?RADIANCE", Kind("hdr", "Radiance HDR")),
    (0, b"#?RGBE", Kind("hdr", "Radiance HDR")),
    (0, b"\x8aMNG\r\n\x1a\n", Kind("mng", "MNG")),
    (0, b"\x8bJNG\r\n\x1a\n", Kind("mng", "JNG")),
    (0, b"\xabKTX ", Kind("ktx", "KTX")),
    (0, b"BPG\xfb", Kind("bpg", "BPG")),
    (0, b"SIMPLE  =", Kind("fits", "FITS")),
    (0, b"\xd7\xcd\xc6\x9a", Kind("wmf", "WMF")),
    (40, b" EMF", Kind("emf", "EMF")),
    (0, b"IIRO", Kind("raw", "camera RAW")),
    (0, b"IIRS", Kind("raw", "camera RAW")),
    (0, b"IIU\0", Kind("raw", "camera RAW")),
    (0, b"MMOR", Kind("raw", "camera RAW")),
    (0, b"FUJIFILMCCD-RAW", Kind("raw", "camera RAW")),
    (0, b"FOVb", Kind("raw", "camera RAW")),
    (128, b"DICM", Kind("dicom", "DICOM")),
    (0, b"AT&TFORM", Kind("djvu", "DjVu")),
    (0, b"%PDF-", Kind("pdf", "a PDF document", picture=False)),
    (0, b"%!PS", Kind("eps", "PostScript")),
    (0, b"\xc5\xd0\xd3\xc6", Kind("eps", "PostScript")),
    (0, b"\x1f\x8b", Kind("gzip", "gzip data", picture=False)),
    (0, b"PK\3\4", Kind("zip", "a ZIP archive", picture=False)),
    (0, b"7z\xbc\xaf\x27\x1c", Kind("7z", "a 7-Zip archive", picture=False)),
    (0, b"Rar!\x1a\7", Kind("rar", "a RAR archive", picture=False)),
    (0, b"\x1a\x45\xdf\xa3", Kind("video", "a WebM or Matroska video", picture=False)),
    # Texts that clients send in place of the bytes: the beginnings of base64 of JPEG, PNG, GIF and WEBP.
    (0, b"/9j/", _BASE64),
    (0, b"iVBORw0KGgo", _BASE64),
    (0, b"R0lGOD", _BASE64),
    (0, b"UklGR", _BASE64),
    (0, b"data:image/", Kind("data_uri", "a data URI", picture=False)),
    (0, b"image=", Kind("form", "an encoded form", picture=False)),
    (4, b"moov", _VIDEO),
    (4, b"mdat", _VIDEO),
)
# Brands of ISO base media files, and the kind of each group. A file may have several brands.
_BRANDS = (
    ((b"avif", b"avis"), _BY_LABEL["avif"]),
    ((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"), _BY_LABEL["heic"]),
    ((b"crx ",), Kind("raw", "camera RAW")),
    ((b"jxl ",), Kind("jxl", "JPEG XL")),
    ((b"jp2 ", b"jpx ", b"jph "), Kind("jp2", "JPEG 2000")),
    ((b"mif1", b"msf1", b"heif"), Kind("heif", "HEIF that is neither AVIF nor HEIC")),
)
_OF_RIFF = {b"WEBP": _BY_LABEL["webp"], b"AVI ": Kind("video", "an AVI video", picture=False)}
_NETPBM = {
    b"1": "PBM",
    b"4": "PBM",
    b"2": "PGM",
    b"5": "PGM",
    b"3": "PPM",
    b"6": "PPM",
    b"7": "PAM",
    b"F": "PFM",
    b"f": "PFM",
}


def kind_of(data: bytes) -> Kind | None:
    """Returns the kind of file that the bytes announce, or None if it is unknown.

    The first ``HEAD_BYTES`` and the last ``TAIL_BYTES`` of a file are enough.
    """
    for offset, signature, kind in _SIGNATURES:
        if data.startswith(signature, offset):
            return kind
    if data.startswith(b"ftyp", 4):
        return _of_brands(data)
    if data.startswith(b"RIFF"):
        return _OF_RIFF.get(data[8:12])
    if data.startswith(b"BM") and int.from_bytes(data[14:18], "little") in _BMP_HEADERS:
        return _BY_LABEL["bmp"]
    if data[:1] == b"P" and data[1:2] in _NETPBM and data[2:3].isspace():
        return Kind("ppm", _NETPBM[data[1:2]])
    return Kind("tga", "TGA") if _is_targa(data) else _of_text(data)


def _is_targa(data: bytes) -> bool:
    """Returns whether data is a Targa: by its end, or for old files by a header of a picture without a palette."""
    if data.endswith(b"TRUEVISION-XFILE.\0"):
        return True
    old = len(data) > 18 and data[1] == 0 and data[2] in (2, 3, 10, 11) and not any(data[3:12])
    return old and any(data[12:14]) and any(data[14:16]) and data[16] in (8, 16, 24, 32) and data[17] < 64


def is_readable(label: str) -> bool:
    """Returns whether a format is read with the installed packages."""
    return label in READ and (label not in _MODULES or _is_installed(_MODULES[label]))


@cache
def _is_installed(module: str) -> bool:
    # Looked up once, as a process that decodes images may open no file later.
    return find_spec(module) is not None


def readable() -> str:
    """Returns the formats that are read with the installed packages, such as ``JPEG, PNG or WEBP``."""
    names = [label.upper() for label in READ if is_readable(label)]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def sniff(data: bytes) -> str:
    """Returns the label of the format that the bytes announce, or ``""`` if it is unknown."""
    kind = kind_of(data)
    return kind.label if kind else ""


def _of_brands(data: bytes) -> Kind | None:
    length = min(max(struct.unpack_from(">I", data)[0], 16), 512)
    brands = {data[8:12], *(data[at : at + 4] for at in range(16, min(length, len(data)), 4))}
    for names, kind in _BRANDS:
        if not brands.isdisjoint(names):
            return kind
    return _VIDEO


def _of_text(data: bytes) -> Kind | None:
    """Returns the kind of markup, if any, behind a byte order mark, a prolog, comments and white space."""
    head = data[:_TEXT_HEAD]
    encoding = "utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    text = head.decode(encoding, "ignore").lstrip().lower()
    if not text.startswith("<"):
        return None
    if text.startswith(("<!doctype html", "<html", "<head", "<body")):
        return _HTML
    known = [(at, kind) for mark, kind in (("<svg", _SVG), ("<html", _HTML)) if (at := text.find(mark)) >= 0]
    # The first element is the document's: a page may hold a drawing, and a drawing a page.
    return min(known, key=lambda each: each[0])[1] if known else None


Reason = Literal[
    "empty",
    "not_an_image",
    "truncated",
    "too_large",
    "too_complex",
    "zero_size",
    "unsupported_format",
    "wrong_size",
]


class ImageError(ValueError):
    """A picture that cannot be read. The message says what to do. ``reason`` is a label for metrics."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NeedsMemory(Exception):  # noqa: N818 - the picture may be a good one
    """A picture that needs more memory than was granted: ``size`` bytes. No pixel of it was decoded."""

    def __init__(self, size: int) -> None:
        super().__init__(f"it takes {size} bytes to decode")
        self.size = size


def damaged(name: str) -> ImageError:
    """Returns the error of a file that no decoder can read to its end."""
    return ImageError("truncated", f"the {name.upper()} data is incomplete or damaged; send the whole file")


def too_complex(name: str, what: str, remedy: str = "save it anew, without them") -> ImageError:
    """Returns the error of a file whose parts cost more than its pixels."""
    return ImageError("too_complex", f"the {name} has {what}, which takes too long to decode; {remedy}")


def zero_size() -> ImageError:
    """Returns the error of a picture without pixels."""
    return ImageError("zero_size", "the image is 0 pixels wide or high; send one with at least one pixel")


def unsupported(what: str) -> ImageError:
    """Returns the error of a format or variant that is not read, such as ``what`` = "JPEG XL images"."""
    return ImageError("unsupported_format", f"{what} are not read; {remedy()}")


def not_a_picture(kind: Kind | None) -> ImageError:
    """Returns the error of data that no program shows as a picture."""
    what = f"{kind.name}, not an image" if kind else "not an image"
    return ImageError("not_an_image", f"the data is {what}; {remedy()}")


def remedy() -> str:
    """Returns advice to send one of the formats that are read."""
    return f"send {readable()}"
