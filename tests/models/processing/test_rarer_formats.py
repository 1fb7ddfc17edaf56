"""GIF, BMP, TIFF, AVIF and HEIC: the first picture, upright, with what is transparent on white."""

import io
import struct
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL
import pytest
from numpy.typing import NDArray
from PIL import Image
from support.attacks.attack_pictures import bmp_in_runs
from support.parity.pictures import encoded, masked, scene

from snapcap.models.processing.image_formats import ImageError, NeedsMemory, is_readable
from snapcap.models.processing.tiff import read_tiff
from snapcap.models.processing.transform import ImageTransform

WIDTH, HEIGHT = 90, 70
PICTURE = scene(WIDTH, HEIGHT)
TRANSFORM = ImageTransform((HEIGHT, WIDTH))
heic = pytest.mark.skipif(not is_readable("heic"), reason="pillow-heif is not installed")


def decoded(data: bytes) -> NDArray[np.uint8]:
    return TRANSFORM.decode(data).pixels


def by_pillow(data: bytes) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def see_through() -> Image.Image:
    """Its left half is transparent over blue."""
    image = PICTURE.convert("RGBA")
    image.paste((0, 0, 255, 0), (0, 0, WIDTH // 2, HEIGHT))
    return image


def heif(image: Image.Image, **options: Any) -> bytes:
    from pillow_heif import register_heif_opener

    register_heif_opener()
    return encoded(image, "HEIF", quality=100, chroma=444, **options)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "AVIF"])
@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_opaque_pictures_are_as_pillow_converts_them(kind: str, mode: str) -> None:
    data = encoded(PICTURE.convert(mode), kind)
    assert (decoded(data) == by_pillow(data)).all()
    assert TRANSFORM.decode(data).format == kind.lower()


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"])
def test_each_kind_of_tiff(mode: str, compression: str) -> None:
    if compression == "jpeg" and mode == "P":
        pytest.skip("there is none")
    if (compression, mode) == ("raw", "YCbCr") and int(PIL.__version__.split(".")[0]) < 13:
        pytest.skip("this Pillow reads none, nor those that it has written")
    data = encoded(PICTURE.convert(mode), "TIFF", compression=compression)
    assert (decoded(data) == by_pillow(data)).all()


@pytest.mark.parametrize("compression", ["group3", "group4", "tiff_ccitt"])
def test_a_fax(compression: str) -> None:
    data = encoded(PICTURE.convert("1"), "TIFF", compression=compression)
    assert (decoded(data) == by_pillow(data)).all()


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
def test_many_strips_and_only_the_first_page(compression: str) -> None:
    pages = {"save_all": True, "append_images": [PICTURE.rotate(180)]}
    data = encoded(PICTURE, "TIFF", compression=compression, strip_size=700, **pages)
    assert (decoded(data) == np.asarray(PICTURE)).all()


@pytest.mark.parametrize("strip_size", [700, 1 << 20])
@pytest.mark.parametrize("mode", ["1", "L", "RGB"])
def test_a_tiff_that_lacks_its_last_byte_is_refused(mode: str, strip_size: int) -> None:
    """What is put behind the file for Pillow is not taken for its pixels."""
    data = encoded(PICTURE.convert(mode), "TIFF", strip_size=strip_size)
    assert (decoded(data) == by_pillow(data)).all()
    with pytest.raises(ImageError, match="incomplete or damaged"):
        decoded(data[:-1])


@pytest.mark.parametrize("order", ["<", ">"])
def test_greys_of_more_than_8_bits_are_scaled(order: str) -> None:
    grey = (np.arange(HEIGHT * WIDTH, dtype=np.uint16) * 10).reshape(HEIGHT, WIDTH)
    mode = "I;16" if order == "<" else "I;16B"
    sixteen = Image.frombytes(mode, (WIDTH, HEIGHT), grey.astype(f"{order}u2").tobytes())
    assert (decoded(encoded(sixteen, "TIFF")) == (grey >> 8)[..., None]).all()
    whole = Image.fromarray(grey.astype(np.int32))
    assert (decoded(encoded(whole, "TIFF")) == (grey >> 8)[..., None]).all()
    for most in (1.0, 255.0, 4000.0):
        shades = decoded(encoded(Image.fromarray((grey / grey.max() * most).astype(np.float32)), "TIFF"))
        assert np.abs(shades[..., 0] - grey / grey.max() * 255).max() <= 1, most


GREY = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) * 4095 // (HEIGHT * WIDTH - 1)  # of 12 bits
SHADES = GREY >> 4


def strip(data: bytes, bits: int, *tags: tuple[int, int, list[int]], order: str = "<", samples: int = 1) -> bytes:
    """A TIFF of one strip without compression; a tag of its own is (number, 3 for 2 bytes, values)."""
    given = {each[0]: each for each in tags}
    own = ((258, 3, [bits] * samples), (259, 3, [1]), (262, 3, [1]), (273, 4, [8]), (277, 3, [samples]))
    for each in ((256, 3, [WIDTH]), (257, 3, [HEIGHT]), *own, (278, 3, [HEIGHT]), (279, 4, [len(data)])):
        given.setdefault(each[0], each)
    directory, values, end = b"", b"", 8 + len(data) + 2 + 12 * len(given) + 4
    for tag, kind, numbers in sorted(given.values()):
        packed = struct.pack(f"{order}{len(numbers)}{'H' if kind == 3 else 'I'}", *numbers)
        directory += struct.pack(f"{order}HHI", tag, kind, len(numbers))
        directory += packed.ljust(4, b"\0") if len(packed) <= 4 else struct.pack(f"{order}I", end + len(values))
        values += packed if len(packed) > 4 else b""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(data))
    return head + data + struct.pack(f"{order}H", len(given)) + directory + bytes(4) + values


def in_12_bits(grey: NDArray[Any]) -> bytes:
    return int("".join(f"{value:012b}" for value in grey.flat), 2).to_bytes(grey.size * 12 // 8, "big")


NUMBERS = {
    "12 bits": strip(in_12_bits(GREY), 12),
    "12 bits in 16": strip(GREY.astype("<u2").tobytes(), 16),
    "12 bits in 16, the other order": strip(GREY.astype(">u2").tobytes(), 16, order=">"),
    "10 bits in 16": strip((GREY >> 2).astype("<u2").tobytes(), 16),
    "16 bits": strip((GREY << 4).astype("<u2").tobytes(), 16),
    "32 bits": strip((GREY.astype("<u4") << 20).tobytes(), 32),
    "8 bits around 0": strip((SHADES - 128).astype("i1").tobytes(), 8, (339, 3, [2])),
    "8 bits around 0, the other order": strip((SHADES - 128).astype("i1").tobytes(), 8, (339, 3, [2]), order=">"),
    "16 bits around 0": strip(((GREY << 4) - (1 << 15)).astype("<i2").tobytes(), 16, (339, 3, [2])),
    "32 bits around 0": strip((GREY - 1000).astype("<i4").tobytes(), 32, (339, 3, [2])),
    "floats around 0": strip((GREY / 2047.5 - 1).astype("<f4").tobytes(), 32, (339, 3, [3])),
}


@pytest.mark.parametrize("data", NUMBERS.values(), ids=NUMBERS.keys())
def test_greys_come_out_alike_whatever_numbers_a_program_writes(data: bytes) -> None:
    assert np.abs(decoded(data)[..., 0].astype(int) - SHADES).max() <= 1


def test_a_number_far_below_0_is_no_pixel() -> None:
    """Programs of maps mark missing values with such a number."""
    grey = (GREY >> 4).astype("<f4")
    grey[0, 0] = -9999
    assert np.abs(decoded(strip(grey.tobytes(), 32, (339, 3, [3])))[..., 0].astype(int) - SHADES).max() <= 1


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("compression", [1, 8])
@pytest.mark.parametrize("zero_is_white", [False, True])
@pytest.mark.parametrize(("bits", "numbers"), [(12, 1), (16, 1), (32, 1), (32, 3), (64, 3)])
def test_greys_of_each_size_order_and_direction(
    bits: int, numbers: int, zero_is_white: bool, compression: int, order: str
) -> None:
    shown = 1 - GREY / 4095 if zero_is_white else GREY / 4095
    whole = np.round(shown * ((1 << bits) - 1)) if numbers == 1 else shown
    data = in_12_bits(whole.astype(int)) if bits == 12 else b""
    data = data or whole.astype(f"{order}{'f' if numbers == 3 else 'u'}{bits // 8}").tobytes()
    tags = (259, 3, [compression]), (262, 3, [0 if zero_is_white else 1]), (339, 3, [numbers])
    tiff = strip(zlib.compress(data) if compression == 8 else data, bits, *tags, order=order)
    assert np.abs(decoded(tiff)[..., 0].astype(int) - SHADES).max() <= 1


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("kind", ["RGB", "multiplied alpha", "alpha", "CMYK"])
def test_colours_in_separate_planes(kind: str, bits: int, order: str) -> None:
    """The strips of the file are its planes, one strip for each."""
    image = PICTURE.convert("CMYK") if kind == "CMYK" else see_through() if "alpha" in kind else PICTURE
    samples = np.asarray(image).astype(int)
    if kind == "multiplied alpha":
        samples[samples[..., 3] == 0] = 0
    planes = (samples * (257 if bits == 16 else 1)).transpose(2, 0, 1).astype(f"{order}u{bits // 8}").tobytes()
    count = len(image.mode)
    starts, lengths = [8 + len(planes) // count * each for each in range(count)], [len(planes) // count] * count
    extra = [(338, 3, [1 if kind == "multiplied alpha" else 2])] if "alpha" in kind else []
    colours = (262, 3, [5 if kind == "CMYK" else 2])
    places = (273, 4, starts), (279, 4, lengths), (284, 3, [2])
    wanted = decoded(encoded(see_through() if "alpha" in kind else PICTURE))
    assert (decoded(strip(planes, bits, colours, *places, *extra, order=order, samples=count)) == wanted).all()


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("shared", [(2, 1), (2, 2), (4, 4)])
def test_pixels_that_share_colours_without_compression(shared: tuple[int, int], order: str) -> None:
    """The picture ends within a group of such pixels."""
    across, down = shared
    samples = np.asarray(PICTURE.convert("YCbCr"))
    tops, lefts = range(0, HEIGHT, down), range(0, WIDTH, across)
    samples = np.pad(samples, ((0, -HEIGHT % down), (0, -WIDTH % across), (0, 0)), "edge")
    groups = [samples[top : top + down, left : left + across] for top in tops for left in lefts]
    data = b"".join(each[..., 0].tobytes() + each[0, 0, 1:].tobytes() for each in groups)
    tags = [(262, 3, [6]), (530, 3, [*shared])]
    pixels = decoded(strip(data, 8, *tags, order=order, samples=3))
    light = np.asarray(Image.fromarray(pixels).convert("YCbCr"))[..., 0].astype(int)
    assert np.abs(light - samples[:HEIGHT, :WIDTH, 0]).mean() < 3
    assert np.abs(pixels[::down, ::across].astype(int) - np.asarray(PICTURE)[::down, ::across]).mean() < 2
    with pytest.raises(ImageError, match="incomplete or damaged"):
        decoded(strip(data, 8, *tags, order=order, samples=3)[: len(data)])


@pytest.mark.parametrize("step", [1, 257])
def test_a_palette_in_8_or_16_bits_a_number(step: int) -> None:
    palette = [step * shade for shade in (*range(256), *range(255, -1, -1), *[0] * 256)]
    pixels = decoded(strip(SHADES.astype("u1").tobytes(), 8, (262, 3, [3]), (320, 3, palette)))
    assert (pixels == np.stack([SHADES, 255 - SHADES, 0 * SHADES], -1)).all()


def test_a_fourth_channel_that_no_program_has_filled_in() -> None:
    rgb = np.asarray(PICTURE)
    data = np.concatenate([rgb, np.zeros((HEIGHT, WIDTH, 1), np.uint8)], -1).tobytes()
    assert (decoded(strip(data, 8, (262, 3, [2]), samples=4)) == rgb).all()


def test_a_16_bit_grey_whose_zero_is_white() -> None:
    grey = (np.arange(HEIGHT * WIDTH, dtype=np.uint16) * 10).reshape(HEIGHT, WIDTH)
    data = bytearray(encoded(Image.fromarray(grey), "TIFF"))
    at = data.index(struct.pack("<HHI", 262, 3, 1)) + 8
    assert data[at] == 1
    data[at] = 0
    assert (decoded(bytes(data)) == 255 - (grey >> 8)[..., None]).all()


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "AVIF", pytest.param("HEIF", marks=heic)])
def test_what_is_transparent_is_white(kind: str) -> None:
    lossless = {"AVIF": {"quality": 100, "subsampling": "4:4:4"}}.get(kind, {})
    data = heif(see_through()) if kind == "HEIF" else encoded(see_through(), kind, **lossless)
    pixels = decoded(data)
    assert (pixels[:, : WIDTH // 2 - 2] == 255).all()
    assert np.abs(pixels[:, WIDTH // 2 + 2 :].astype(int) - np.asarray(PICTURE)[:, WIDTH // 2 + 2 :]).mean() < 12


def test_a_palette_of_a_tiff_and_a_gif_with_a_transparent_entry() -> None:
    image = Image.new("P", (WIDTH, HEIGHT), 1)
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.paste(0, (0, 0, 9, 9))
    pixels = decoded(encoded(image, "GIF", transparency=1))
    assert (pixels[:9, :9] == (200, 0, 0)).all()
    assert (pixels[9:] == 255).all()
    alpha = image.convert("PA")
    alpha.putalpha(image.point([255, 0] + [0] * 254, "L"))
    assert (decoded(encoded(alpha, "TIFF")) == pixels).all()


def test_of_an_animation_the_first_frame() -> None:
    frames = [Image.new("RGB", (WIDTH, HEIGHT), colour) for colour in ("red", "blue", "lime")]
    for kind, more in (("GIF", {"disposal": 2}), ("GIF", {"disposal": 3}), ("AVIF", {"subsampling": "4:4:4"})):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **more)
        assert np.abs(decoded(data).astype(int) - (255, 0, 0)).max() <= 3


def test_around_a_frame_that_is_smaller_than_the_screen_is_white() -> None:
    red = Image.new("P", (20, 10))
    red.putpalette([255, 0, 0])
    data = bytearray(encoded(red, "GIF"))
    struct.pack_into("<HH", data, 6, WIDTH, HEIGHT)
    at = data.index(struct.pack("<BHHHH", 0x2C, 0, 0, 20, 10))
    struct.pack_into("<HH", data, at + 1, 5, 7)
    pixels = decoded(bytes(data))
    assert (pixels[7:17, 5:25] == (255, 0, 0)).all()
    assert (pixels != 255).any(axis=2).sum() == 20 * 10


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
def test_a_tiff_is_turned_once(turn: int, compression: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    transform = ImageTransform((WIDTH, HEIGHT) if turn > 4 else (HEIGHT, WIDTH))
    wanted = transform.decode(encoded(PICTURE, exif=exif)).pixels
    assert (transform.decode(encoded(PICTURE, "TIFF", exif=exif, compression=compression)).pixels == wanted).all()


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["AVIF", pytest.param("HEIF", marks=heic)])
def test_what_a_box_says_of_the_turn_is_done_once(turn: int, kind: str) -> None:
    """`irot` and `imir`, which stand for the EXIF block's word."""
    exif = Image.Exif()
    exif[0x0112] = turn
    transform = ImageTransform((WIDTH, HEIGHT) if turn > 4 else (HEIGHT, WIDTH))
    wanted = transform.decode(encoded(PICTURE, exif=exif)).pixels
    if kind == "HEIF":
        image = PICTURE.copy()
        image.info["exif"] = exif.tobytes()
        data = heif(image)
    else:
        data = encoded(PICTURE, "AVIF", exif=exif, quality=100, subsampling="4:4:4")
    assert np.abs(transform.decode(data).pixels.astype(int) - wanted).max() <= 8


def with_alpha(image: Image.Image, compression: int = 3) -> bytes:
    return masked(image, (0xFF0000, 0xFF00, 0xFF, 0xFF000000), compression=compression)


def test_bitmaps_with_alpha() -> None:
    data = with_alpha(see_through())
    assert (decoded(data)[:, : WIDTH // 2] == 255).all()
    assert (decoded(data)[:, WIDTH // 2 :] == np.asarray(PICTURE)[:, WIDTH // 2 :]).all()
    assert (decoded(with_alpha(see_through(), compression=0)) == decoded(data)).all(), "as browsers show it"
    image = PICTURE.convert("RGBA")
    image.putalpha(0)
    assert (decoded(with_alpha(image)) == np.asarray(PICTURE)).all(), "no program has filled it in"


MASKS: dict[str, tuple[int, int, int, Sequence[int]]] = {
    "4 bits": (16, 40, 3, (0xF00, 0xF0, 0xF)),
    "4 bits and alpha": (16, 108, 3, (0xF00, 0xF0, 0xF, 0xF000)),
    "5 bits and alpha of 1": (16, 56, 3, (0x7C00, 0x3E0, 0x1F, 0x8000)),
    "5 and 6 bits": (16, 40, 3, (0xF800, 0x7E0, 0x1F)),
    "blue first": (16, 52, 3, (0x1F, 0x7E0, 0xF800)),
    "red in the lowest byte": (32, 40, 3, (0xFF, 0xFF00, 0xFF0000)),
    "10 bits": (32, 40, 3, (0x3FF00000, 0xFFC00, 0x3FF)),
    "10 bits and alpha of 2": (32, 124, 3, (0x3FF, 0xFFC00, 0x3FF00000, 0xC0000000)),
    "4 masks behind an old header": (32, 40, 6, (0xFF0000, 0xFF00, 0xFF, 0xFF000000)),
    "alpha in the lowest byte": (32, 124, 3, (0xFF000000, 0xFF0000, 0xFF00, 0xFF)),
}


@pytest.mark.parametrize(("bits", "head", "compression", "masks"), MASKS.values(), ids=MASKS.keys())
def test_bitmaps_with_any_masks(bits: int, head: int, compression: int, masks: Sequence[int]) -> None:
    image = see_through() if len(masks) == 4 else PICTURE
    pixels = decoded(masked(image, masks, bits, head, compression)).astype(int)
    steps = [(1 << min(mask.bit_count(), 8)) - 1 for mask in masks[:3]]
    assert (np.abs(pixels - decoded(encoded(image))) <= [128 // step + 1 for step in steps]).all()
    white = decoded(encoded(image)).min(-1) == 255
    assert (pixels[white] == 255).all()


def test_masks_that_no_program_writes_are_refused() -> None:
    data = bytearray(masked(PICTURE, (0xF00, 0xF0, 0xF), 16, 40))
    struct.pack_into("<I", data, 54, 0b101)
    with pytest.raises(ImageError, match="BMP images of 16 bits with these masks are not read"):
        decoded(bytes(data))


def test_a_bitmap_with_more_colours_than_its_pixels_can_name() -> None:
    data = bytearray(encoded(PICTURE.convert("P"), "BMP"))
    struct.pack_into("<I", data, 46, 300)
    assert (decoded(bytes(data)) == np.asarray(PICTURE.convert("P").convert("RGB"))).all()


def test_runs_may_end_before_the_last_row_but_not_the_file() -> None:
    data = bmp_in_runs(WIDTH, HEIGHT, b"")
    start = int.from_bytes(data[10:14], "little")
    pixels = decoded(data[:start] + b"\x0a\x07\0\0\x04\x09\0\1\0\0")
    assert (pixels[-1, :10] == 7).all()
    assert (pixels[-2, :4] == 9).all()
    assert (pixels != 0).any(axis=2).sum() == 14
    with pytest.raises(ImageError, match="incomplete or damaged"):
        decoded(data[:start] + b"\x0a\x07\0\0\x04\x09")


def test_a_bitmap_from_above_and_one_in_runs() -> None:
    data = bytearray(encoded(PICTURE, "BMP"))
    struct.pack_into("<i", data, 22, -HEIGHT)
    assert (decoded(bytes(data)) == np.asarray(PICTURE)[::-1]).all()
    pixels = decoded(bmp_in_runs(WIDTH, HEIGHT, b"\x0a\x07\x00\x03abc\x00"))
    assert pixels[5, :15, 0].tolist() == [7] * 10 + [*b"abc", 0, 0]


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "AVIF", pytest.param("HEIF", marks=heic)])
def test_a_cut_file_is_refused_and_a_large_one_before_it_is_decoded(kind: str) -> None:
    data = heif(PICTURE) if kind == "HEIF" else encoded(PICTURE, kind)
    for left in (len(data) // 10, len(data) // 2, len(data) - 100, len(data) - 9):
        with pytest.raises(ImageError) as error:
            decoded(data[:left])
        assert error.value.reason in ("truncated", "not_an_image"), left
    with pytest.raises(ImageError, match="90×70 pixels is over the limit of 6299"):
        ImageTransform((8, 8), max_pixels=WIDTH * HEIGHT - 1).decode(data)
    with pytest.raises(NeedsMemory) as needs:
        TRANSFORM.decode(data, 1000)
    assert TRANSFORM.decode(data, needs.value.size).pixels.shape == (HEIGHT, WIDTH, 3)


def patched(data: bytes, tag: int, value: int) -> bytes:
    """A TIFF with another value in its directory."""
    at = struct.unpack_from("<I", data, 4)[0] + 2
    while struct.unpack_from("<H", data, at)[0] != tag:
        at += 12
    return data[: at + 8] + struct.pack("<I", value) + data[at + 12 :]


LZW = encoded(PICTURE, "TIFF", compression="tiff_lzw", strip_size=700)
DEAR = {
    "pixels of a bitmap": (
        encoded(PICTURE, "BMP")[:18] + struct.pack("<ii", 60_000, 60_000) + encoded(PICTURE, "BMP")[26:],
        "too_large",
    ),
    "screen of an animation": (b"GIF89a\xff\xff\xff\xff" + encoded(PICTURE, "GIF")[10:], "too_large"),
    "pixels of a TIFF": (patched(patched(patched(LZW, 256, 60_000), 257, 60_000), 278, 60_000), "too_large"),
    "runs of a bitmap": (bmp_in_runs(4000, 4000, b"\1\7"), "too_complex"),
    "comments of an animation": (encoded(PICTURE, "GIF")[:13] + (b"!\xfe" + b"\1a" * 3_000_000), "too_complex"),
    "extensions of an animation": (b"GIF89a\1\0\1\0\0\0\0" + b"!\xfe\0" * 1_000_000, "too_complex"),
    "side of an AVIF": (encoded(Image.new("RGB", (32_769, 8)), "AVIF"), "too_large"),
    "no frame": (b"GIF89a\1\0\1\0\0\0\0;", "truncated"),
}


@pytest.mark.parametrize(("data", "reason"), DEAR.values(), ids=DEAR.keys())
def test_what_is_dear_is_refused_before_a_codec_sees_it(
    data: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(image: Image.Image) -> None:
        raise AssertionError("a codec was given it")

    monkeypatch.setattr(Image.Image, "load", load)
    with pytest.raises(ImageError) as error:
        decoded(data)
    assert error.value.reason == reason


def test_a_directory_of_a_tiff_costs_nothing() -> None:
    """Tags that nobody needs, each of which is as long as the file, further pages, and a directory in a circle."""
    data = encoded(PICTURE, "TIFF")
    plain = read_tiff(data)
    entries = b"".join(struct.pack("<HHII", tag, 7, len(data), 0) for tag in range(40_000, 50_000))
    at = struct.unpack_from("<I", data, 4)[0]
    (count,) = struct.unpack_from("<H", data, at)
    own = data[at + 2 : at + 2 + 12 * count]
    directory = struct.pack("<H", count + 10_000) + own + entries + struct.pack("<I", 8)
    heavy = data[:4] + struct.pack("<I", len(data)) + data[8:] + directory
    assert len(read_tiff(heavy).data) < len(heavy) + len(plain.data) - len(data) + 2
    assert (decoded(heavy) == np.asarray(PICTURE)).all()


def test_strips_that_lie_on_each_other_are_refused() -> None:
    data = bytearray(encoded(PICTURE.resize((2000, 2000)), "TIFF", compression="tiff_lzw", strip_size=6000))
    at = struct.unpack_from("<I", data, 4)[0] + 2
    for tag, value in ((273, 8), (279, len(data) // 2)):
        while struct.unpack_from("<H", data, at)[0] != tag:
            at += 12
        count, place = struct.unpack_from("<II", data, at + 4)
        assert count == 2000
        struct.pack_into(f"<{count}I", data, place, *([value] * count))
    with pytest.raises(ImageError, match="strips or tiles that lie on each other") as error:
        decoded(bytes(data))
    assert error.value.reason == "too_complex"


def test_nothing_is_said_of_a_picture_on_the_way() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("GIF", "BMP", "TIFF", "AVIF"):
            decoded(encoded(PICTURE, kind))
