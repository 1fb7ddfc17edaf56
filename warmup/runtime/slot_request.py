"""What a request puts into its slot. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Search:
    """A beam search: its rows, the tokens it generates at most, and what transformers calls by these names."""

    num_beams: int
    new_tokens: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


@dataclass(frozen=True)
class Row:
    """What a request puts into its slot: a prompt, and how its tokens are chosen.

    ``temperature`` 0 is greedy, ``top_k`` 0 keeps all tokens; ``uniforms`` holds one number in [0, 1) a
    position, drawn from the request's seed, and may be empty for a greedy row. ``repetition_penalty`` 1 and
    ``no_repeat_ngram_size`` 0 change nothing. With a ``search`` the row is the first of so many.
    """

    prompt: Sequence[int] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    uniforms: Sequence[float] = ()
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    search: Search | None = None

    @property
    def penalised(self) -> bool:
        """Its scores are changed by the tokens it holds."""
        return self.repetition_penalty != 1 or self.no_repeat_ngram_size > 0


@dataclass(frozen=True)
class Needs:
    """What a step does beside the greedy tokens: whatever one of its rows needs."""

    sampling: bool = False
    penalties: bool = False
    beams: bool = False


GREEDY = Needs()
