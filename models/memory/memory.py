"""Defines how buffers are made, viewed, written, and copied from slot to slot. No torch."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np

B = TypeVar("B")
# Dtype, shape and strides in elements: ("float32", (4, 8), (8, 1)).
Spec = tuple[str, tuple[int, ...], tuple[int, ...]]
# Copies what each of some slots holds into another one.
CopySlots = Callable[[Sequence[int], Sequence[int]], None]


class Memory(Protocol[B]):
    """The buffers of one device; dtypes by their names in torch. Used by the device thread alone."""

    @property
    def kind(self) -> Literal["cpu", "cuda"]: ...

    def zeros(self, dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> B:
        """A new buffer, row by row if it is not said otherwise.

        Raises:
            RuntimeError, MemoryError: there is no memory for it.
        """
        ...

    def spec(self, buffer: B) -> Spec:
        """Dtype, shape and strides."""
        ...

    def view(self, buffer: B, *index: int | slice) -> B:
        """A part, in the same memory."""
        ...

    def array(self, buffer: B) -> "np.ndarray[Any, Any] | None":
        """The same memory, 16-bit floats as their bits; None where the host cannot reach it."""
        ...

    def write(self, buffer: B, slots: Sequence[int], values: "np.ndarray[Any, Any]") -> None:
        """Copy ``values`` [len(slots), …], of the buffer's dtype, into these of its first dimension. What was given
        to the device before goes first, and ``values`` may be changed once this returns."""
        ...

    def copier(self, buffers: Sequence[tuple[B, int]]) -> CopySlots:
        """What copies slots of all these buffers, whose slots are in the dimension beside them, 0 or 1: from each
        source into its target, of which none may be a source too."""
        ...


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of what lies row by row."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))
