"""Reads the fields of a ``preprocessor_config.json``, as transformers 4 and 5 write them.

A missing field has the default of transformers' image processor of that name; a value that cannot be used is a
``ConfigError``.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snapcap.models.dataclass import dataclass
from snapcap.models.fields import ConfigError, is_there, json_or_empty, read_json

Channels = tuple[float, ...]
# Pillow's numbers of resize filters, of which there are six.
LANCZOS, BILINEAR, BICUBIC, FILTERS = 1, 2, 3, range(6)
MOST_EDGE = 4096  # transformers' own limit, above which it scales once more
_FILE = "preprocessor_config.json"
_NESTED_FILE = "processor_config.json"  # of transformers 5, with tokenizer and image processor in one
_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ProcessorDefaults:
    """What an image processor of transformers does where its file says nothing. Sizes in pixels, of a square.

    resample: Pillow's number of the resize filter. crop_size: None does not crop. shortest_edge: a size that is one
    number is the length of the shorter edge, not a square; ``size`` is that too if there is a crop. longest_edge:
    of a first resize, which keeps the shape; the picture is then resized to its square ``size``, which its file
    calls ``max_image_size``.
    """

    size: int = 224
    resample: int = BILINEAR
    mean: Channels = _HALF
    std: Channels = _HALF
    crop_size: int | None = None
    shortest_edge: bool = False
    longest_edge: int | None = None


_CLIP = ProcessorDefaults(224, BICUBIC, _CLIP_MEAN, _CLIP_STD, crop_size=224, shortest_edge=True)
_PROCESSORS = {
    "Beit": ProcessorDefaults(resample=BICUBIC),
    "Blip": ProcessorDefaults(384, BICUBIC, _CLIP_MEAN, _CLIP_STD),
    "CLIP": _CLIP,
    "Idefics3": ProcessorDefaults(364, LANCZOS, longest_edge=4 * 364),
    "SmolVLM": ProcessorDefaults(364, LANCZOS, longest_edge=4 * 364),
    "DeiT": ProcessorDefaults(256, BICUBIC, crop_size=224),
    "Llava": _CLIP,
    "Siglip": ProcessorDefaults(224, BICUBIC, shortest_edge=True),
    "ViT": ProcessorDefaults(),
}
_KINDS = {
    "beit": "Beit",
    "blip": "Blip",
    "deit": "DeiT",
    "git": "CLIP",
    "idefics3": "Idefics3",
    "llava": "Llava",
    "smolvlm": "SmolVLM",
    "vit": "ViT",
}
_OF_FAMILY = {
    **{family: _PROCESSORS[kind] for family, kind in _KINDS.items()},
    # Their files name CLIP's processor, and say these.
    "florence2": ProcessorDefaults(768, BICUBIC, _IMAGENET_MEAN, _IMAGENET_STD),
}
_NAME = re.compile(r"(\w+?)(?:ImageProcessor(?:Fast|Pil)?|FeatureExtractor)")


def read_processor(folder: Path) -> Mapping[str, Any] | None:
    """The image processor's fields, in transformers' order: the nested file goes before the plain one; None where
    there is neither.

    Raises:
        ConfigError: a file cannot be read, or holds something else.
    """
    nested = json_or_empty(folder / _NESTED_FILE).get("image_processor")
    if nested is not None:
        if not isinstance(nested, dict):
            raise ConfigError("image_processor", nested, f"{_NESTED_FILE} must hold this object")
        return nested
    file = folder / _FILE
    return read_json(file) if is_there(file) else None


def processed_size(config: Mapping[str, Any], family: str) -> tuple[int, int] | None:
    """(height, width) of every picture behind the processor; None where it keeps the picture's shape.

    Raises:
        ConfigError: a field cannot be used.
    """
    preset = defaults(config, family)
    wanted: tuple[int, int] | int = 0
    if switch(config, "do_center_crop", preset.crop_size is not None):
        wanted = size(config, "crop_size", preset.crop_size or 224)
    elif switch(config, "do_resize", True):
        wanted = size(config, "size", preset.size, preset.shortest_edge)
    return None if isinstance(wanted, int) else wanted


def defaults(config: Mapping[str, Any], family: str) -> ProcessorDefaults:
    """Those of the processor that the file names, or of the encoder's family where it names none."""
    for field in ("image_processor_type", "feature_extractor_type"):
        name = config.get(field)
        if name is not None:
            match = _NAME.fullmatch(str(name))
            if match is None or match[1] not in _PROCESSORS:
                known = ", ".join(f"{kind}ImageProcessor" for kind in _PROCESSORS)
                raise ConfigError(field, name, f"supported are {known}")
            return _PROCESSORS[match[1]]
    return _OF_FAMILY[family]


def size(
    config: Mapping[str, Any], field: str, default: tuple[int, int] | int, shortest_edge: bool = False
) -> tuple[int, int] | int:
    """(height, width), or the length of the shorter edge, as which one number counts if it is said so."""
    value = config.get(field)
    if value is None:
        value = default
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
        case _:
            pass
    raise ConfigError(field, value, "a number of pixels, a height and width, or a shortest_edge is expected")


def longest_edge(config: Mapping[str, Any], field: str, default: int) -> int:
    """The length of a longer edge, in pixels."""
    value = config.get(field)
    match {"longest_edge": default} if value is None else value:
        case {"longest_edge": int(edge), **others} if 0 < edge <= MOST_EDGE and not any(others.values()):
            return edge
        case _:
            pass
    raise ConfigError(field, value, f"a longest_edge of at most {MOST_EDGE} pixels is expected")


def switch(config: Mapping[str, Any], field: str, default: bool) -> bool:
    value = config.get(field, default)
    if value is None:  # transformers takes an explicit null for off
        return False
    if not isinstance(value, bool):
        raise ConfigError(field, value, "true or false is expected")
    return value


def number(config: Mapping[str, Any], field: str, default: float) -> float:
    value = config.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(field, value, "a number is expected")
    return float(value)


def channels(config: Mapping[str, Any], field: str, default: Channels, nonzero: bool = False) -> Channels:
    """One number per channel; a single one counts for all three."""
    value = config.get(field)
    if value is None:
        return default
    values = value if isinstance(value, list) else [value] * 3
    numbers = tuple(float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    if len(numbers) != 3 or len(values) != 3 or (nonzero and 0.0 in numbers):
        raise ConfigError(field, value, "three numbers are expected" + (", none of them 0" if nonzero else ""))
    return numbers


def resample(config: Mapping[str, Any], default: int) -> int:
    value = config.get("resample")
    if value is None:
        return default
    if isinstance(value, bool) or value not in FILTERS:
        raise ConfigError("resample", value, "the number of a Pillow filter, 0 to 5, is expected")
    return int(value)
