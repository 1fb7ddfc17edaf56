"""What a request puts into its slot. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What a request puts into its slot: a prompt, and how its tokens are chosen.

    ``temperature`` 0 is greedy, ``top_k`` 0 keeps all tokens; ``uniforms`` holds one number in [0, 1) a
    position, drawn from the request's seed, and may be empty for a greedy row.
    """

    prompt: Sequence[int] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    uniforms: Sequence[float] = ()
