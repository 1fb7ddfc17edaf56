"""Defines how buffers are made, viewed, written, and copied from slot to slot. Imports no torch."""

from collections.abc import Callable, Sequence
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
        """Returns a new zeroed buffer, row-major unless ``strides``, in elements, are given.

        Raises:
            RuntimeError, MemoryError: there is not enough memory.
        """
        ...

    def spec(self, buffer: B) -> Spec:
        """Returns dtype, shape and strides of a buffer."""
        ...

    def view(self, buffer: B, *index: int | slice) -> B:
        """Returns a view of a part of the buffer."""
        ...

    def array(self, buffer: B) -> "np.ndarray[Any, Any] | None":
        """Returns a numpy view of the buffer, with bfloat16 numbers as bits. None if the host cannot reach it."""
        ...

    def write(self, buffer: B, slots: Sequence[int], values: "np.ndarray[Any, Any]") -> None:
        """Copies ``values`` [len(slots), …], of the buffer's dtype, to these places of its first dimension.

        Work given to the device before is done first. ``values`` may be changed once this returns.
        """
        ...

    def copier(self, buffers: Sequence[tuple[B, int]]) -> CopySlots:
        """Returns a function that copies slots of all these buffers from sources to targets.

        Each buffer is given with the dimension of its slots, 0 or 1. No slot may be both source and target.
        """
        ...


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a row-major buffer."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))
