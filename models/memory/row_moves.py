"""Copies the K/V of beams that go on from other rows, if the host knows which rows move. Imports no torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np


class RowMoves:
    """Copies the K/V of rows that move, and no others. `models.regions.state.reorder` is the version for a device
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
