"""Beams go on from other rows' caches: copy their K/V."""

import torch
from torch import Tensor

_STEP = 16


def reorder(
    key: Tensor,  # [N, slots, H, d, L]
    value: Tensor,  # [N, slots, H, L, d]
    parents: Tensor,  # [b] int64: the slot that each of the first b goes on from; one that is left goes on itself
    positions: Tensor,  # [b] int64: that of the next token; what is cached stands before it
) -> None:
    """Give each row what its parent has cached, by launches alone: nobody knows here which rows are moved."""
    rows, length = parents.shape[0], value.shape[3]
    cached = (torch.arange(length, device=parents.device) < positions.unsqueeze(1)).view(1, rows, 1, length, 1)
    for cache in (key.mT, value):  # on CUDA a key's memory is as a value's
        own = cache[:, :rows]
        own.copy_(torch.where(cached, cache.index_select(1, parents), own))


class RowMoves:
    """What `reorder` does, where the host knows the parents: only what is moved is copied, in one call.

    The views that it copies are made once, for each length up to a multiple of ``_STEP``: making them takes a small
    model longer than copying.
    """

    def __init__(self, key: Tensor, value: Tensor) -> None:
        """``key`` and ``value`` as in `reorder`."""
        self._key, self._value = key, value
        self._views: dict[int, list[tuple[Tensor, ...]]] = {}

    def move(self, parents: Tensor, positions: Tensor) -> None:
        """As `reorder`; of a row that is moved, some of what stands behind its position may be copied too."""
        moves = [(source, target) for target, source in enumerate(parents.tolist()) if source != target]
        if moves:
            caches = self._up_to(max(positions.tolist()))
            targets = [rows[target] for rows in caches for _, target in moves]
            torch._foreach_copy_(targets, [rows[source] for rows in caches for source, _ in moves])

    def _up_to(self, filled: int) -> list[tuple[Tensor, ...]]:
        """Of keys and of values, each slot's part that holds so many: [N, H, d, n] and [N, H, n, d]."""
        length = -(-filled // _STEP) * _STEP
        if length not in self._views:
            self._views[length] = [self._key[..., :length].unbind(1), self._value[..., :length, :].unbind(1)]
        return self._views[length]
