"""Beams go on from other rows' caches: copy their K/V."""

from torch import Tensor


def reorder(
    key: Tensor,  # [N, slots, H, d, L]
    value: Tensor,  # [N, slots, H, L, d]
    parents: Tensor,  # [b] int64: the slot that each of the first b goes on from; one that is left goes on itself
    positions: Tensor,  # [b] int64: that of the next token; what is cached stands before it
) -> None:
    """Give each row its parent's cache. On CUDA by launches alone; a CPU copies only what must be copied."""
    if key.is_cuda:
        rows = parents.shape[0]
        for cache in (key.mT, value):  # there a key's memory is as a value's
            cache[:, :rows].copy_(cache.index_select(1, parents))
        return
    moves = [(source, target) for target, source in enumerate(parents.tolist()) if source != target]
    if moves:
        filled = int(positions.max())
        for cache in (key[..., :filled], value[..., :filled, :]):
            for source, target in moves:
                cache[:, target].copy_(cache[:, source])
