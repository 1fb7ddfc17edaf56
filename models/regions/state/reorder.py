"""Beams go on from other rows' caches: copy their K/V."""

import torch
from torch import Tensor


def reorder(
    key: Tensor,  # [N, slots or one more, H, d, L]
    value: Tensor,  # [N, slots or one more, H, L, d]
    parents: Tensor,  # [b] int64: the slot that each of the first b goes on from; one that is left goes on itself
    positions: Tensor,  # [b] int64: that of the next token; what is cached stands before it
) -> None:
    """Give each row what its parent has cached, by launches alone: nobody knows here which rows are moved."""
    rows, length = parents.shape[0], value.shape[3]
    cached = (torch.arange(length, device=parents.device) < positions.unsqueeze(1)).view(1, rows, 1, length, 1)
    for cache in (key.mT, value):  # on CUDA a key's memory is as a value's
        own = cache[:, :rows]
        own.copy_(torch.where(cached, cache.index_select(1, parents), own))
