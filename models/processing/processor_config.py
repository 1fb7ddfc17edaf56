"""Reads the fields of a ``preprocessor_config.json``, as transformers 4 and 5 write them.

A missing field has the default of transformers' image processor of that name. A value that cannot be used is a
``ConfigError``.
"""

import re
from pathlib import Path

from snapcap.models.dataclass import dataclass
from snapcap.models.fields import MOST, ConfigError, Fields, is_there, is_whole, json_or_empty, read_json
from snapcap.models.processing.packed import TOKEN_PIXELS, most_tokens

Channels = tuple[float, ...]
# Pillow's numbers of resize filters. There are six.
LANCZOS, BILINEAR, BICUBIC, FILTERS = 1, 2, 3, range(6)
MOST_EDGE = 4096  # transformers' own limit; above it transformers scales once more
_FILE = "preprocessor_config.json"
NESTED_FILE = "processor_config.json"  # written by transformers 5, with tokenizer and image processor in one
ANSWERS = "post_processor_config"  # a member of the nested file
_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ProcessorDefaults:
    """Defaults of an image processor of transformers, for fields that its file lacks.

    size: side of a square, in pixels.
    resample: Pillow's number of the resize filter.
    crop_size: side of the crop, in pixels. None does not crop.
    shortest_edge: a size that is a single number is the length of the shorter edge, not a square. ``size`` is such
        a number if there is a crop.
    longest_edge: length of the longer edge after a first resize, which keeps the shape. A second resize makes a
        square of ``size``, which the file calls ``max_image_size``.
    area: the least and the greatest area of a picture, in pixels. The picture keeps its shape, and ``size`` has no
        meaning.
    """

    size: int = 224
    resample: int = BILINEAR
    mean: Channels = _HALF
    std: Channels = _HALF
    crop_size: int | None = None
    shortest_edge: bool = False
    longest_edge: int | None = None
    area: tuple[int, int] | None = None


_CLIP = ProcessorDefaults(224, BICUBIC, _CLIP_MEAN, _CLIP_STD, crop_size=224, shortest_edge=True)
_PROCESSORS = {
    "Beit": ProcessorDefaults(resample=BICUBIC),
    "Blip": ProcessorDefaults(384, BICUBIC, _CLIP_MEAN, _CLIP_STD),
    "CLIP": _CLIP,
    "Idefics3": ProcessorDefaults(364, LANCZOS, longest_edge=4 * 364),
    "SmolVLM": ProcessorDefaults(364, LANCZOS, longest_edge=4 * 364),
    "DeiT": ProcessorDefaults(256, BICUBIC, crop_size=224),
    "Llava": _CLIP,
    "Qwen2VL": ProcessorDefaults(0, BICUBIC, _CLIP_MEAN, _CLIP_STD, area=(56 * 56, 28 * 28 * 1280)),
    "Siglip": ProcessorDefaults(224, BICUBIC, shortest_edge=True),
    "ViT": ProcessorDefaults(),
}
_OF_FAMILY = {
    "beit": _PROCESSORS["Beit"],
    "blip": _PROCESSORS["Blip"],
    "deit": _PROCESSORS["DeiT"],
    # The files name CLIP's processor, and hold these values.
    "florence2": ProcessorDefaults(768, BICUBIC, _IMAGENET_MEAN, _IMAGENET_STD),
    "git": _CLIP,
    "idefics3": _PROCESSORS["Idefics3"],
    "llava": _CLIP,
    # The files name Qwen2-VL's processor, and hold these values.
    "qwen3_vl": ProcessorDefaults(0, BICUBIC, area=(65536, 16777216)),
    "smolvlm": _PROCESSORS["SmolVLM"],
    "vit": _PROCESSORS["ViT"],
}
_NAME = re.compile(r"(\w+?)(?:ImageProcessor(?:Fast|Pil)?|FeatureExtractor)")


def read_processor(folder: Path) -> Fields | None:
    """Returns the image processor's fields, or None if there is no file.

    Like in transformers, the nested file goes before the plain one, a switch that is null is false, and another
    field that is null is missing. Raises ConfigError if a file cannot be read, or holds something else."""
    given = json_or_empty(folder / NESTED_FILE).get("image_processor")
    if given is None:
        file = folder / _FILE
        if not is_there(file):
            return None
        given = read_json(file)
    if not isinstance(given, dict):
        raise ConfigError("image_processor", given, f"{NESTED_FILE} must hold this object")
    switches = {name: False for name, value in given.items() if value is None and name.startswith("do_")}
    return Fields({name: value for name, value in given.items() if value is not None} | switches)


def processed_size(folder: Path, family: str, image_tokens: int) -> tuple[int, int] | None:
    """Returns (height, width) of every picture behind the folder's processor, or None if it keeps the picture's
    shape.

    Pictures of any shape are packed into arrays of this size (``packed``). In a folder without the processor's
    fields, only these pictures have a size.

    Args:
        image_tokens: greatest number of tokens of a picture of any shape.

    Raises:
        ConfigError: a field cannot be used.
    """
    given = read_processor(folder)
    config = given or Fields({})
    preset = defaults(config, family)
    if preset.area is not None:
        least, most = area(config, preset.area)
        return most_tokens(least, min(most, image_tokens * TOKEN_PIXELS)) + 1, TOKEN_PIXELS
    if given is None:
        return None
    wanted: tuple[int, int] | int = 0
    if config.switch("do_center_crop", preset.crop_size is not None):
        wanted = size(config, "crop_size", preset.crop_size or 224)
    elif config.switch("do_resize", True):
        wanted = size(config, "size", preset.size, preset.shortest_edge)
    return None if isinstance(wanted, int) else wanted


def defaults(config: Fields, family: str) -> ProcessorDefaults:
    """Returns the defaults of the processor that the file names, or else of the encoder's family."""
    for field in ("image_processor_type", "feature_extractor_type"):
        name = config.values.get(field)
        if name is not None:
            match = _NAME.fullmatch(str(name))
            if match is None or match[1] not in _PROCESSORS:
                known = ", ".join(f"{kind}ImageProcessor" for kind in _PROCESSORS)
                raise config.error(field, name, f"supported are {known}")
            return _PROCESSORS[match[1]]
    return _OF_FAMILY[family]


def size(
    config: Fields, field: str, default: tuple[int, int] | int, shortest_edge: bool = False
) -> tuple[int, int] | int:
    """Returns (height, width), or the length of the shorter edge. With ``shortest_edge``, a single number is such
    a length."""
    value = config.values.get(field, default)
    match value:
        case bool():
            pass
        case int() if value > 0:
            return value if shortest_edge else (value, value)
        case [int(height), int(width)] if height > 0 and width > 0:
            return height, width
        case {"height": int(height), "width": int(width)} if height > 0 and width > 0:
            return height, width
        case {"shortest_edge": int(edge), **others} if edge > 0 and not any(others.values()):
            return edge
    raise config.error(field, value, "a number of pixels, a height and width, or a shortest_edge is expected")


def area(config: Fields, default: tuple[int, int]) -> tuple[int, int]:
    """Returns the least and the greatest area of a picture, in pixels.

    Transformers has them under two names each: the older names are used if a file has both.
    """
    given = config.values.get("size")
    bounds = []
    for older, edge, preset in zip(
        ("min_pixels", "max_pixels"), ("shortest_edge", "longest_edge"), default, strict=True
    ):
        value = config.values.get(older)
        if value is None and isinstance(given, dict):
            value = given.get(edge)
        value = preset if value is None else value
        if not is_whole(value) or not TOKEN_PIXELS <= value <= MOST:
            raise config.error(edge, value, f"an area of {TOKEN_PIXELS} to {MOST} pixels is expected")
        bounds.append(value)
    least, most = bounds
    if least > most:
        raise config.error("size", given, "the least area is greater than the greatest")
    return least, most


def longest_edge(config: Fields, field: str, default: int) -> int:
    """Returns the length of a longer edge, in pixels."""
    value = config.values.get(field, {"longest_edge": default})
    match value:
        case {"longest_edge": int(edge), **others} if 0 < edge <= MOST_EDGE and not any(others.values()):
            return edge
    raise config.error(field, value, f"a longest_edge of at most {MOST_EDGE} pixels is expected")


def channels(config: Fields, field: str, default: Channels, nonzero: bool = False) -> Channels:
    """Returns one number for each of three channels. A single number counts for all three."""
    value = config.values.get(field, [*default])
    values = value if isinstance(value, list) else [value] * 3
    numbers = tuple(float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    if len(numbers) != 3 or len(values) != 3 or (nonzero and 0.0 in numbers):
        raise config.error(field, value, "three numbers are expected" + (", none of them 0" if nonzero else ""))
    return numbers


def resample(config: Fields, default: int) -> int:
    value = config.values.get("resample", default)
    if isinstance(value, bool) or value not in FILTERS:
        raise config.error("resample", value, "the number of a Pillow filter, 0 to 5, is expected")
    return int(value)
