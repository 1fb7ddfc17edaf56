"""Copies K/V between rows, for beams that go on from another row's cache."""

import torch
from torch import Tensor


def reorder(
    key: Tensor,  # [N, slots or one more, H, d, L]
    value: Tensor,  # [N, slots or one more, H, L, d]
    # [b] int64: the slot that each of the first b rows goes on from; its own slot for a row that stays
    parents: Tensor,
    positions: Tensor,  # [b] int64: position of the next token; cached tokens are before it
) -> None:
    """Gives each row the cached K/V of its parent. Copies every row, because the host does not know which rows
    move."""
    rows, length = parents.shape[0], value.shape[3]
    cached = (torch.arange(length, device=parents.device) < positions.unsqueeze(1)).view(1, rows, 1, length, 1)
    for cache in (key.mT, value):  # on CUDA, keys lie in memory like values
        own = cache[:, :rows]
        own.copy_(torch.where(cached, cache.index_select(1, parents), own))
