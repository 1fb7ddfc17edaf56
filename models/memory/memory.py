"""Defines how buffers are made, viewed, written and copied, and describes them without making them.

The module imports neither torch nor numpy: buffers of a CPU are written through their own numpy arrays. A
description tells a model's memory before anything is allocated.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np

B = TypeVar("B")
# Dtype, shape and strides in elements: ("float32", (4, 8), (8, 1)).
Spec = tuple[str, tuple[int, ...], tuple[int, ...]]
# Copies the contents of each source slot to the target slot at the same place.
CopySlots = Callable[[Sequence[int], Sequence[int]], None]


class Memory(Protocol[B]):
    """The buffers of one device. Dtypes have their names in torch. Only the device thread uses it."""

    @property
    def kind(self) -> Literal["cpu", "cuda"]: ...

    def zeros(self, dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> B:
        """Returns a new zeroed buffer, row-major unless ``strides``, in elements, are given. Raises RuntimeError,
        MemoryError if there is not enough memory."""

    def spec(self, buffer: B) -> Spec:
        """Returns dtype, shape and strides of a buffer."""

    def view(self, buffer: B, *index: int | slice) -> B:
        """Returns a view of a part of the buffer."""

    def array(self, buffer: B) -> "np.ndarray[Any, Any] | None":
        """Returns a numpy view of the buffer, with bfloat16 numbers as bits. None if the host cannot reach it."""

    def write(self, buffer: B, slots: Sequence[int], values: "np.ndarray[Any, Any]") -> None:
        """Copies ``values`` [len(slots), …], of the buffer's dtype, to these places of its first dimension.

        Work given to the device before is done first. ``values`` may be changed once this returns.
        """

    def copier(self, buffers: Sequence[tuple[B, int]]) -> CopySlots:
        """Returns a function that copies slots of all these buffers from sources to targets.

        Each buffer is given with the dimension of its slots, 0 or 1. No slot may be both source and target.
        """


class HostMemory(Memory[B]):
    """The part of a `Memory` that works if the host reaches every buffer."""

    kind: Literal["cpu"] = "cpu"

    @abstractmethod
    def array(self, buffer: B) -> "np.ndarray[Any, Any]": ...

    def write(self, buffer: B, slots: Sequence[int], values: "np.ndarray[Any, Any]") -> None:
        self.array(buffer)[list(slots)] = values

    def copier(self, buffers: Sequence[tuple[B, int]]) -> CopySlots:
        rows = [self.array(buffer).swapaxes(0, dimension) for buffer, dimension in buffers]

        def copy(sources: Sequence[int], targets: Sequence[int]) -> None:
            for each in rows:
                for source, target in zip(sources, targets, strict=True):
                    each[target] = each[source]

        return copy


def move_rows(
    key: "np.ndarray[Any, Any]", value: "np.ndarray[Any, Any]", parents: Sequence[int], positions: Sequence[int]
) -> None:
    """Copies the cached K/V of each row's parent to the row, and no others. `models.layers.choice` is the version
    for a device that the host does not wait for.

    Args:
        key, value: [N, slots, H, d, L] and [N, slots, H, L, d]; both may have one more slot.
        parents: the slot that each row goes on from; its own slot for a row that stays.
        positions: the position of each row's next token; cached tokens are before it.
    """
    for target, source in enumerate(parents):
        if source != target:
            filled = positions[target]
            key[:, target, ..., :filled] = key[:, source, ..., :filled]
            value[:, target, :, :filled] = value[:, source, :, :filled]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a row-major buffer."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields pairs of a source and a target slot as runs, in which both increase by one: the first source, the
    first target, and the number of pairs."""
    first = (0, 0)
    count = 0
    for source, target in zip(sources, targets, strict=True):
        if count and (source, target) == (first[0] + count, first[1] + count):
            count += 1
            continue
        if count:
            yield (*first, count)
        first, count = (source, target), 1
    if count:
        yield (*first, count)


ITEM_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}


class ShapeMemory:
    """A `Memory` whose buffers are their own specs.

    ``kind`` is the device type, on which layouts depend. ``allocated`` is the number of bytes of all buffers that
    were made; views take none.
    """

    def __init__(self, kind: Literal["cpu", "cuda"]) -> None:
        self.kind: Literal["cpu", "cuda"] = kind
        self.allocated = 0

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
    return ITEM_BYTES[dtype] * math.prod(shape)
