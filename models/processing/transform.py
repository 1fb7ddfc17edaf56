"""Transforms the bytes of an image as a checkpoint's image processor does.

The bytes become uint8 pixels of the size that the encoder takes, and pixels become normalised floats.

Results equal those of transformers' image processors of ViT, DeiT, BEiT and BLIP (Pillow backend), except for
transparent pixels, 16-bit greys, and large JPEGs, which are decoded at a fraction of their size
(``image.read_image``).
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from snapcap.models.dataclass import dataclass
from snapcap.models.fields import ConfigError, Fields
from snapcap.models.processing import processor_config as fields
from snapcap.models.processing.image_formats import ImageError
from snapcap.models.processing.packed import SIDE, TOKEN_PIXELS, fitting_size, pack
from snapcap.models.processing.resample import Pixels, Resampler

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

_HALF = (0.5, 0.5, 0.5)


class Normalisation(NamedTuple):
    """Normalisation of a pixel value x by the image processor: (x * rescale - mean) / std, for each channel."""

    rescale: float = 1.0
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class DecodedImage:
    """A picture ready for the encoder.

    rgb: of the size that the encoder takes.
    format: one of ``image_formats.READ``.
    size: (width, height) of the upright picture before it was resized.
    """

    rgb: Pixels
    format: str
    size: tuple[int, int]

    @property
    def pixels(self) -> "NDArray[np.uint8]":
        """The picture's pixels, uint8 [H, W, 3]."""
        return _array(self.rgb)


@dataclass(frozen=True)
class ImageTransform:
    """The steps from a picture to the encoder's input. Defaults are those of transformers' ViT.

    size: (height, width) of the result, in pixels.
    resample: Pillow's number of the resize filter (2 is bilinear).
    resize_to: (height, width), or the length of the shorter edge. ``None`` is ``size``.
    longest_edge: the length of the longer edge after a first resize, which keeps the shape. A second resize goes
        to ``size``.
    area: the least and the greatest area after the resize, in pixels. The picture keeps its shape, and is packed
        into an array of ``size`` (``packed.pack``).
    do_center_crop: cut ``size`` out of the middle of the resized picture.
    max_pixels: greatest number of pixels of a picture before it is resized.
    resampler: resizes with the same result as Pillow in less time. ``None`` leaves it to Pillow.
    """

    size: tuple[int, int]
    resample: int = fields.BILINEAR
    do_resize: bool = True
    normalisation: Normalisation = Normalisation(1 / 255, _HALF, _HALF)
    max_pixels: int = 50_000_000
    resize_to: tuple[int, int] | int | None = None
    do_center_crop: bool = False
    longest_edge: int | None = None
    area: tuple[int, int] | None = None
    resampler: Resampler | None = None

    @classmethod
    def from_folder(
        cls, folder: Path, image_size: tuple[int, int], max_pixels: int = 50_000_000, family: str = "vit"
    ) -> "ImageTransform":
        """Reads ``preprocessor_config.json``, or its part of ``processor_config.json``.

        Without both, the defaults of the encoder's family are used, for the encoder's size.

        Args:
            image_size: (height, width) that the encoder takes. The file must lead to exactly this size.
            family: the encoder's family, as in ``VisionConfig``.

        Raises:
            ConfigError: a field is not supported, or does not fit the encoder.
        """
        given = fields.read_processor(folder)
        config = given or Fields({})
        preset = fields.defaults(config, family)
        filter_, normalisation = fields.resample(config, preset.resample), _normalisation(config, preset)
        plain = cls(image_size, filter_, normalisation=normalisation, max_pixels=max_pixels)
        if given is not None:
            return _from_config(config, preset, plain)
        edge = max(image_size) if preset.shortest_edge else None
        return replace(
            plain,
            resize_to=edge,
            do_center_crop=edge is not None,
            longest_edge=None if preset.longest_edge is None else 4 * max(image_size),
            area=None if preset.area is None else _area(config, preset.area, image_size),
        )

    def decode(self, data: bytes, room: int | None = None) -> DecodedImage:
        """Decodes the bytes of a picture's file into pixels of the encoder's size, not yet rescaled.

        Args:
            room: greatest number of bytes of memory for decoding. None sets no limit.

        Raises:
            ImageError: the data cannot be used. ``reason`` says why, and the message says what to do.
            NeedsMemory: decoding takes more than ``room``. No pixel was decoded.
        """
        # Imported here, because processes that run the model or pass images on need only the numbers above, and no
        # Pillow.
        from snapcap.models.processing.image import read_image  # noqa: PLC0415

        picture, name, size = read_image(data, self, room)
        return DecodedImage(self._fitted(picture), name, size)

    def convert(self, image: "Image.Image") -> "NDArray[np.uint8]":
        """Converts a Pillow image into pixels of the encoder's size, uint8 [H, W, 3].

        A large JPEG is not decoded at a fraction of its size, so pixels may differ by a few steps from those of
        ``decode``. Raises ImageError as ``decode`` does.
        """
        from snapcap.models.processing.image import convert_image  # noqa: PLC0415

        return _array(self._fitted(convert_image(image, self)))

    @property
    def second_size(self) -> tuple[int, int] | None:
        """(width, height) after the second resize. None if the model has none."""
        return (self.size[1], self.size[0]) if self.do_resize and self.longest_edge is not None else None

    def first_size(self, width: int, height: int) -> tuple[int, int] | None:
        """Returns (width, height) after the first resize of an upright picture of this size. None if the model does
        not resize."""
        if not self.do_resize:
            return None
        if self.area is not None:
            return fitting_size(width, height, *self.area)
        if self.longest_edge is not None:
            return _with_longest_edge(width, height, self.longest_edge)
        if isinstance(self.resize_to, int):
            edge = self.resize_to
            if width <= height:
                return edge, edge * height // width
            return edge * width // height, edge
        target = self.resize_to or self.size
        return target[1], target[0]

    def _fitted(self, picture: Pixels) -> Pixels:
        """Returns the picture, cropped or packed if the transform does that. Raises ImageError if it has the
        wrong size."""
        if self.area is not None:
            return pack(picture, self.size[0] - 1)
        height, width = self.size
        has, wants = picture.size, (width, height)
        if self.do_center_crop:
            if has[0] < width or has[1] < height:
                raise _wrong_size(has, f"at least {width}×{height}")
            return picture.cut((has[0] - width) // 2, (has[1] - height) // 2, wants)
        if has != wants:
            raise _wrong_size(has, f"exactly {width}×{height}")
        return picture


def _array(pixels: Pixels) -> "NDArray[np.uint8]":
    import numpy as np  # noqa: PLC0415 - a process that only decodes does without numpy

    width, height = pixels.size
    return np.frombuffer(pixels.data, np.uint8).reshape(height, width, 3)


def _with_longest_edge(width: int, height: int, edge: int) -> tuple[int, int]:
    """Returns (width, height) with the longer edge ``edge``, and the shorter edge in proportion and even, by
    transformers' arithmetic."""
    ratio = width / height
    if width >= height:
        shorter = int(edge / ratio)
        return edge, max(shorter + shorter % 2, 1)
    shorter = int(edge * ratio)
    return max(shorter + shorter % 2, 1), edge


def _wrong_size(size: tuple[int, int], expected: str) -> ImageError:
    return ImageError(
        "wrong_size",
        f"the image is {size[0]}×{size[1]} pixels and this model does not resize; send {expected}",
    )


def _normalisation(config: Fields, preset: fields.ProcessorDefaults) -> Normalisation:
    """Returns the normalisation that the file names, which is neutral where rescaling and normalising are off."""
    factor = config.number("rescale_factor", 1 / 255)
    rescale = factor if config.switch("do_rescale", True) else 1.0
    mean = fields.channels(config, "image_mean", preset.mean)
    std = fields.channels(config, "image_std", preset.std, nonzero=True)
    return Normalisation(rescale, mean, std) if config.switch("do_normalize", True) else Normalisation(rescale)


def _from_config(config: Fields, preset: fields.ProcessorDefaults, plain: ImageTransform) -> ImageTransform:
    """Returns ``plain`` with the steps that the file names."""
    image_size = plain.size
    if preset.area is not None:
        return _of_any_shape(config, preset.area, plain)
    if preset.longest_edge is not None:
        return _of_tiles(config, preset.size, preset.longest_edge, plain)
    if config.switch("do_pad", False):
        raise config.error("do_pad", True, "padding is not supported")
    do_resize = config.switch("do_resize", True)
    do_center_crop = config.switch("do_center_crop", preset.crop_size is not None)
    own = preset.size if preset.crop_size is not None else (preset.size, preset.size)
    size = fields.size(config, "size", own, preset.shortest_edge)
    if do_center_crop:
        crop = fields.size(config, "crop_size", preset.crop_size or 224)
        _fits("crop_size", config.values.get("crop_size"), crop, image_size)
        edges = (size, size) if isinstance(size, int) else size
        if do_resize and (edges[0] < image_size[0] or edges[1] < image_size[1]):
            raise config.error("size", config.values.get("size"), f"smaller than the crop, {image_size}")
    elif do_resize:
        _fits("size", config.values.get("size"), size, image_size)
    return replace(
        plain,
        do_resize=do_resize,
        resize_to=size if do_resize and size != image_size else None,
        do_center_crop=do_center_crop,
    )


def _of_tiles(config: Fields, size: int, longest_edge: int, plain: ImageTransform) -> ImageTransform:
    """Returns the transform of Idefics3 and SmolVLM: one tile without padding, whatever the file says about
    splitting and padding."""
    for field in ("do_pad", "do_image_splitting"):
        config.switch(field, True)
    edge = fields.longest_edge(config, "max_image_size", size)
    _fits("max_image_size", config.values.get("max_image_size"), (edge, edge), plain.size)
    first = fields.longest_edge(config, "size", longest_edge)
    return replace(plain, longest_edge=first if config.switch("do_resize", True) else None)


def _of_any_shape(config: Fields, area: tuple[int, int], plain: ImageTransform) -> ImageTransform:
    """Returns the transform of Qwen3-VL, for patches of 16 pixels and tokens of 2 × 2 patches."""
    for field, expected in (("patch_size", SIDE // 2), ("merge_size", 2), ("temporal_patch_size", 2)):
        config.require(field, expected, default=expected)
    if not config.switch("do_resize", True):
        raise config.error("do_resize", False, "pictures are always resized to whole tokens")
    return replace(plain, area=_area(config, area, plain.size))


def _area(config: Fields, default: tuple[int, int], image_size: tuple[int, int]) -> tuple[int, int]:
    """Returns the least and the greatest area of a picture that an encoder of ``image_size`` takes. Raises
    ConfigError if the least area does not fit the encoder."""
    least, most = fields.area(config, default)
    tokens = image_size[0] - 1
    if least > tokens * TOKEN_PIXELS:
        raise config.error("size", config.values.get("size"), f"the least area takes more than {tokens} tokens")
    return least, min(most, tokens * TOKEN_PIXELS)


def _fits(field: str, value: object, size: tuple[int, int] | int, image_size: tuple[int, int]) -> None:
    if isinstance(size, int):
        raise ConfigError(field, value, "a height and width are needed, or do_center_crop with a crop_size")
    if size != image_size:
        raise ConfigError(field, value, f"the encoder takes {image_size[0]}×{image_size[1]} (height × width)")
