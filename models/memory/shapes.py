"""Describes buffers without making them, so that a model's memory is known before anything is allocated."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from snapcap.models.memory.memory import CopySlots, Spec, row_major

_ITEM_BYTES = {"bool": 1, "uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}


class ShapeMemory:
    """A `Memory` whose buffers are their own specs.

    ``kind`` is the device type, on which layouts depend. ``allocated`` is the number of bytes of all buffers that
    were made; views take none.
    """

    def __init__(self, kind: Literal["cpu", "cuda"]) -> None:
        self._kind = kind
        self.allocated = 0

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        return self._kind

    def zeros(self, dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> Spec:
        buffer = dtype, tuple(shape), row_major(shape) if strides is None else tuple(strides)
        self.allocated += spec_bytes(buffer)
        return buffer

    def spec(self, buffer: Spec) -> Spec:
        return buffer

    def view(self, buffer: Spec, *index: int | slice) -> Spec:
        dtype, shape, strides = buffer
        lengths, steps = [], []
        for part, length, step in zip(index, shape, strides, strict=False):
            if isinstance(part, slice):
                lengths.append(len(range(length)[part]))
                steps.append(step * (part.step or 1))
        return dtype, (*lengths, *shape[len(index) :]), (*steps, *strides[len(index) :])

    def array(self, buffer: Spec) -> None:
        return None

    def write(self, buffer: Spec, slots: Sequence[int], values: Any) -> None:
        """Does nothing: a description holds no values."""

    def copier(self, buffers: Sequence[tuple[Spec, int]]) -> CopySlots:
        return lambda _sources, _targets: None


def spec_bytes(spec: Spec) -> int:
    """Returns the bytes of the elements of a buffer or view, without gaps between them."""
    dtype, shape, _ = spec
    return _ITEM_BYTES[dtype] * math.prod(shape)
