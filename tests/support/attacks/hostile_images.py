"""Makes images that are not what they say, or more than they seem; each says how it was made."""

import io
import struct
import zipfile
import zlib
from functools import cache

from PIL import Image, PngImagePlugin
from support.parity.pictures import encoded, scene

PNG = b"\x89PNG\r\n\x1a\n"


def chunk(kind: bytes, data: bytes, checksum: int | None = None) -> bytes:
    """Returns a chunk of a PNG. ``checksum`` None computes the right checksum."""
    total = zlib.crc32(kind + data) if checksum is None else checksum
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", total)


def png(width: int, height: int, data: bytes, depth: int = 8, colour: int = 0, *extra: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return PNG + header + b"".join(extra) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("index.html", "<script>alert(1)</script>")
    return file.getvalue()


def animation(kind: str, frames: int) -> bytes:
    pictures = [Image.new("RGB", (32, 32), (turn % 256, 0, 0)) for turn in range(frames)]
    return encoded(pictures[0], kind, save_all=True, append_images=pictures[1:])


def with_text(size: int) -> bytes:
    """A good PNG whose compressed comment is much larger than the file."""
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "a" * size, zip=True)
    return encoded(scene(32, 32), "PNG", pnginfo=info)


@cache
def refused() -> dict[str, bytes]:
    """No picture that is read: each is answered 422."""
    small, photo = scene(64, 48), encoded(scene(64, 48), "JPEG")
    return {
        "zeros": b"\0" * 10_000,
        "text": b"Please caption this." * 100,
        "gif_cut": encoded(small, "GIF")[:-900],
        "bmp_cut": encoded(small, "BMP")[:-100],
        "tiff_cut": encoded(small, "TIFF")[:-100],
        "tiff_of_nothing": b"II*\0\x08\0\0\0",
        "tiff_far_directory": b"MM\0*\xff\xff\xff\xff" + bytes(100),
        "avif_cut": encoded(small, "AVIF")[:-100],
        "avif_signature_alone": b"\0\0\0\x18ftypavif\0\0\0\0avifmif1",
        "bigtiff": encoded(small, "TIFF", big_tiff=True),
        "ppm": encoded(small, "PPM"),
        "ico": encoded(small, "ICO"),
        "pdf": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n" + photo,
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "xml_entities": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>',
        "zip": zipped(),
        "elf": b"\x7fELF\x02\x01\x01" + b"\0" * 500,
        "signature_alone": PNG,
        "jpeg_signature_alone": b"\xff\xd8\xff",
        "webp_signature_alone": b"RIFF\xff\xff\xff\xffWEBP",
        "zip_before_jpeg": zipped() + photo,
        "png_zero_wide": png(0, 10, zlib.compress(b"")),
        "png_zero_high": png(10, 0, zlib.compress(b"")),
        "png_largest": png(2**31 - 1, 2**31 - 1, zlib.compress(b"")),
        "png_over_pixels": png(50_000, 50_000, zlib.compress(b"\0" * 1_000_000)),
        "png_negative_size": png(2**32 - 1, 2**32 - 1, zlib.compress(b"")),
        "png_bad_header_checksum": PNG + chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0), 1),
        "png_unknown_depth": png(8, 8, zlib.compress(b"\0" * 72), depth=3),
        "png_unknown_colour": png(8, 8, zlib.compress(b"\0" * 72), colour=5),
        "png_not_deflate": png(64, 64, b"\xff" * 1_000),
        "png_without_pixels": png(1_000, 1_000, zlib.compress(b"")),
        "png_chunk_length_huge": PNG + struct.pack(">I", 2**31 - 1) + b"IHDR",
        "jpeg_cut": photo[: len(photo) // 2],
        "jpeg_header_only": photo[:200],
        "webp_cut": encoded(small, "WEBP")[:-100],
        "webp_lying_size": b"RIFF\x04\0\0\0WEBP" + encoded(small, "WEBP")[12:60],
    }


@cache
def read() -> dict[str, bytes]:
    """Odd pictures that are read: each gets some caption, or is refused as damaged; never more."""
    small = scene(64, 48)
    return {
        "png_text_bomb": with_text(100_000_000),
        "gif": encoded(small, "GIF", comment=b"a" * 100_000),
        "gif_animated": animation("GIF", 200),
        "bmp": encoded(small, "BMP"),
        "tiff": encoded(small, "TIFF", compression="tiff_lzw"),
        "tiff_many_pages": animation("TIFF", 200),
        "avif": encoded(small, "AVIF"),
        "avif_of_a_smaller_size": encoded(Image.new("RGB", (6000, 4000)), "AVIF", speed=10).replace(
            struct.pack(">II", 6000, 4000), struct.pack(">II", 64, 48)
        ),
        "one_pixel": encoded(Image.new("RGB", (1, 1)), "PNG"),
        "one_row": encoded(Image.new("L", (20_000, 1)), "PNG"),
        "one_column": encoded(Image.new("L", (1, 20_000)), "PNG"),
        "one_bit": encoded(Image.new("1", (64, 64)), "PNG"),
        "palette": encoded(small.convert("P"), "PNG"),
        "sixteen_bits": encoded(Image.new("I;16", (64, 64), 40_000), "PNG"),
        "cmyk": encoded(small.convert("CMYK"), "JPEG"),
        "alpha": encoded(small.convert("RGBA"), "WEBP"),
        "animated_png": animation("PNG", 200),
        "animated_webp": animation("WEBP", 200),
        "several_pictures": encoded(small, "MPO", save_all=True, append_images=[small] * 5),
        "jpeg_then_zip": encoded(small, "JPEG") + zipped(),
        "png_then_html": encoded(small, "PNG") + b"<script>alert(1)</script>" * 1_000,
        "png_with_script": encoded(small, "PNG")[:-12]
        + chunk(b"prVt", b"<?php system('id'); ?>")
        + chunk(b"IEND", b""),
        "large_profile": encoded(small, "JPEG", icc_profile=b"\0" * 1_000_000),
        "exif_garbage": encoded(small, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + b"\xff" * 60_000),
        "comment": encoded(small, "JPEG", comment=b"a" * 65_000),
    }
