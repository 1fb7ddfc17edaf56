"""Writes and copies buffers of a CPU with numpy, in their own memory, for every kind of tensor. No torch."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from snapcap.models.memory.memory import B, CopySlots, Memory


class HostMemory(Memory[B]):
    """The part of a `Memory` that works if the host reaches every buffer."""

    kind: Literal["cpu"] = "cpu"

    @abstractmethod
    def array(self, buffer: B) -> "np.ndarray[Any, Any]": ...

    def write(self, buffer: B, slots: Sequence[int], values: "np.ndarray[Any, Any]") -> None:
        self.array(buffer)[list(slots)] = values

    def copier(self, buffers: Sequence[tuple[B, int]]) -> CopySlots:
        rows = [np.moveaxis(self.array(buffer), dimension, 0) for buffer, dimension in buffers]

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
