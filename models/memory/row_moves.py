"""Copies the K/V of beams that go on from other rows, where the host knows which. No torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np


class RowMoves:
    """What `models.regions.state.reorder` does on a device that the host does not wait for: here only what is moved
    is copied."""

    def __init__(self, key: "np.ndarray[Any, Any]", value: "np.ndarray[Any, Any]") -> None:
        """``key`` [N, slots, H, d, L] and ``value`` [N, slots, H, L, d], both perhaps with one slot more."""
        self._key, self._value = key, value

    def move(self, parents: Sequence[int], positions: Sequence[int]) -> None:
        """``parents``: the slot that each row goes on from; one that is left goes on itself. ``positions``: that of
        each row's next token; what is cached stands before it."""
        for target, source in enumerate(parents):
            if source != target:
                filled = positions[target]
                self._key[:, target, ..., :filled] = self._key[:, source, ..., :filled]
                self._value[:, target, :, :filled] = self._value[:, source, :, :filled]
