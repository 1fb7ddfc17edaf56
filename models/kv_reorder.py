"""Beams go on from other rows' caches: copy their K/V."""

import torch
from torch import Tensor


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


def move_rows(key: Tensor, value: Tensor, parents: Tensor, positions: Tensor) -> None:
    """What `reorder` does, where the host knows the parents: only what is moved is copied, in one call."""
    moves = [(source, target) for target, source in enumerate(parents.tolist()) if source != target]
    if moves:
        rows, filled = parents.shape[0], int(positions.max())
        keys, values = key[:, :rows, ..., :filled].unbind(1), value[:, :rows, :, :filled].unbind(1)
        to = [caches[target] for caches in (keys, values) for _, target in moves]
        torch._foreach_copy_(to, [caches[source] for caches in (keys, values) for source, _ in moves])
