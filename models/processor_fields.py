"""The fields of a ``preprocessor_config.json``, as transformers 4 and 5 write them.

A missing field has the default of transformers' ViT image processor; a value that cannot be used is a
``ConfigError``.
"""

from collections.abc import Mapping
from typing import Any

from PIL import Image

from models.config_fields import ConfigError


def size(config: Mapping[str, Any], field: str) -> tuple[int, int] | int:
    """(height, width), or the length of the shorter edge; transformers' default is 224 × 224."""
    value = config.get(field)
    if value is None:
        value = 224
    match value:
        case bool():
            pass
        case int() if value > 0:
            return value, value
        case [int(height), int(width)] if height > 0 and width > 0:
            return height, width
        case {"height": int(height), "width": int(width)} if height > 0 and width > 0:
            return height, width
        case {"shortest_edge": int(edge), **others} if edge > 0 and not any(others.values()):
            return edge
        case _:
            pass
    raise ConfigError(field, value, "a number of pixels, a height and width, or a shortest_edge is expected")


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


def channels(config: Mapping[str, Any], field: str, nonzero: bool = False) -> tuple[float, ...]:
    """One number per channel; a single one counts for all three."""
    value = config.get(field)
    if value is None:
        return (0.5, 0.5, 0.5)
    values = value if isinstance(value, list) else [value] * 3
    numbers = tuple(float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    if len(numbers) != 3 or len(values) != 3 or (nonzero and 0.0 in numbers):
        raise ConfigError(field, value, "three numbers are expected" + (", none of them 0" if nonzero else ""))
    return numbers


def resample(config: Mapping[str, Any]) -> int:
    value = config.get("resample")
    if value is None:
        return int(Image.Resampling.BILINEAR)
    if isinstance(value, bool) or value not in list(Image.Resampling):
        raise ConfigError("resample", value, "the number of a Pillow filter, 0 to 5, is expected")
    return int(value)
