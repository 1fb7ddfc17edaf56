"""Sets the next token and position of each row, at the end of every decoder's step."""

import torch
from torch import Tensor


def advance(
    logits: Tensor,  # [b, V]
    tokens: Tensor,  # [b] int64, replaced by the next tokens
    positions: Tensor,  # [b] int64, advanced by one
    forced: Tensor,  # [b, L] int64: the prompt's token at each position, -1 where generation is free
) -> None:
    """Replaces ``tokens`` by the prompt's token at the next position, or else by the greedy token, and advances
    ``positions``.

    Positions stop at L - 1, so a padding row can run for ever without leaving its cache.
    """
    following = (positions + 1).clamp(max=forced.shape[1] - 1)
    prompt = forced.gather(1, following.unsqueeze(1)).squeeze(1)
    tokens.copy_(torch.where(prompt >= 0, prompt, logits.argmax(dim=-1)))
    positions.copy_(following)
