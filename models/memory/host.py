"""Writes and copies buffers of a CPU with numpy, in their own memory, for every kind of tensor. No torch."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from snapcap.models.memory.memory import B, CopySlots, Memory


class HostMemory(Memory[B]):
    """The part of a `Memory` that works if the host reaches every buffer."""

    @property
    def kind(self) -> Literal["cpu"]:
        return "cpu"

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


class RowMoves:
    """Copies the K/V of rows that move, and no others. `models.layers.choice` is the version for a device
    that the host does not wait for."""

    def __init__(self, key: "np.ndarray[Any, Any]", value: "np.ndarray[Any, Any]") -> None:
        """``key`` is [N, slots, H, d, L] and ``value`` [N, slots, H, L, d]; both may have one more slot."""
        self._key, self._value = key, value

    def move(self, parents: Sequence[int], positions: Sequence[int]) -> None:
        """Copies the cached K/V of each row's parent to the row.

        Args:
            parents: the slot that each row goes on from; its own slot for a row that stays.
            positions: the position of each row's next token; cached tokens are before it.
        """
        for target, source in enumerate(parents):
            if source != target:
                filled = positions[target]
                self._key[:, target, ..., :filled] = self._key[:, source, ..., :filled]
                self._value[:, target, :, :filled] = self._value[:, source, :, :filled]
