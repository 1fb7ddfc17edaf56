"""Holds static buffers of a checkpoint's rules for its tokens; every row has the same. Imports no torch."""

from collections.abc import Collection, Mapping
from typing import Any, Generic

import numpy as np

from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import MAX_PHRASE_TOKENS, MAX_PHRASES
from snapcap.models.memory.memory import B, Memory

RULE_INPUTS = ("ends", "before", "biases", "phrases", "phrase_biases")


@dataclass(frozen=True)
class TokenRules(Generic[B]):
    """Buffers of a checkpoint's rules. Zeroed buffers change no score.

    V is the vocabulary, P ``MAX_PHRASES``, K ``MAX_PHRASE_TOKENS``.
    """

    memory: Memory[B]
    ends: B  # [V] bool: the tokens that end a caption
    before: B  # [V] bool: the tokens in the text before a row's own tokens; every row has the same text there
    biases: B  # [3, V] fp32: added to scores first, added last, and added last to a caption's first token
    phrases: B  # [P, K] int64: sequences of several tokens, right-aligned; -1 in front of them
    phrase_biases: B  # [P] fp32: added to the score of a sequence's last token after its other tokens

    @classmethod
    def allocate(cls, vocabulary: int, memory: Memory[B]) -> "TokenRules[B]":
        """Returns zeroed buffers."""
        return cls(
            memory=memory,
            ends=memory.zeros("bool", (vocabulary,)),
            before=memory.zeros("bool", (vocabulary,)),
            biases=memory.zeros("float32", (3, vocabulary)),
            phrases=memory.zeros("int64", (MAX_PHRASES, MAX_PHRASE_TOKENS)),
            phrase_biases=memory.zeros("float32", (MAX_PHRASES,)),
        )

    def write(
        self,
        ends: Collection[int],
        before: Collection[int],
        biases: Mapping[tuple[int, ...], float],
        suppressed: Collection[int],
        suppressed_first: Collection[int],
    ) -> None:
        """Fills the buffers.

        Args:
            ends: the tokens that end a caption.
            before: the tokens of the text before a row's own tokens.
            biases: by a single token, or by a sequence of several.
            suppressed: tokens that are never chosen.
            suppressed_first: tokens that a caption does not begin with.
        """
        vocabulary = np.arange(self.memory.spec(self.ends)[1][0])
        added = np.zeros((3, len(vocabulary)), np.float32)
        phrases = np.full((MAX_PHRASES, MAX_PHRASE_TOKENS), -1)
        phrases[:, -1] = 0  # the place of no sequence adds 0 to the score of token 0
        phrase_biases = np.zeros(MAX_PHRASES, np.float32)
        place = 0
        for ids, bias in biases.items():
            if len(ids) == 1:
                added[0, ids[0]] = bias
                continue
            phrases[place, -len(ids) :] = ids
            phrase_biases[place] = bias
            place += 1
        added[1, list(suppressed)] = added[2, list(suppressed_first)] = float("-inf")

        def put(buffer: B, values: "np.ndarray[Any, Any]") -> None:
            self.memory.write(buffer, range(len(values)), values)

        put(self.ends, np.isin(vocabulary, [*ends]))
        put(self.before, np.isin(vocabulary, [*before]))
        put(self.biases, added)
        put(self.phrases, phrases)
        put(self.phrase_biases, phrase_biases)

    @property
    def inputs(self) -> tuple[B, ...]:
        """Returns the buffers in the order of ``RULE_INPUTS``."""
        return self.ends, self.before, self.biases, self.phrases, self.phrase_biases
