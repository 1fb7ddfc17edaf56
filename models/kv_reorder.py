"""Beams go on from other rows' caches: move their K/V, in place."""

import torch
from torch import Tensor


def reorder(
    key: Tensor,  # [N, slots, H, d, L]
    value: Tensor,  # [N, slots, H, L, d]
    parents: Tensor,  # [b] int64: the slot that each of the first b goes on from
    positions: Tensor,  # [b] int64: that of the next token; what is cached stands before it
) -> None:
    """Give each row its parent's cache. On CUDA by launches alone; a CPU moves only what must be moved."""
    rows = parents.shape[0]
    if key.is_cuda:
        for cache in (key.mT, value):  # there a key's memory is as a value's
            cache[:, :rows].copy_(cache.index_select(1, parents))
        return
    moved = (parents != torch.arange(rows)).nonzero().squeeze(1)
    if moved.numel():
        source, filled = parents[moved], int(positions.max())
        for cache in (key.mT[..., :filled, :], value[..., :filled, :]):
            cache.index_copy_(1, moved, cache.index_select(1, source))
