"""Checks a request's prompt, length and beams against the slots and the caches. Imports no torch."""

from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import MAX_BEAMS
from snapcap.service.errors import InvalidOption, PromptTooLong


@dataclass(frozen=True)
class Limits:
    """The bounds that the caches and slots set for a request, and the model's defaults."""

    cache_length: int
    """Positions of a row in the caches. The start token takes the first."""
    default_new_tokens: int
    """Number of tokens to generate for a request that names no number."""
    eos_ids: frozenset[int]
    """Tokens that end a caption."""
    max_beams: int = MAX_BEAMS
    """Number of beams that a request may have at most. Each beam takes a slot."""
    forced_end: bool = False
    """A caption that reaches its greatest length is ended with a token in `eos_ids`."""
    prompt_read: int = 0
    """Number of a prompt's tokens, from its first, that are read together with the image."""
    default_counts_prompt: bool = False
    """The tokens of a prompt count towards `default_new_tokens`."""

    @property
    def max_prompt_tokens(self) -> int:
        """Number of tokens that a prompt may have, so that at least one position is left to generate into."""
        return self.cache_length - 2

    def check(self, prompt_tokens: int, wanted: int | None, num_beams: int = 1) -> None:
        """Refuses a request that the caches cannot hold, before it costs anything.

        Raises:
            PromptTooLong: no position is left to generate into.
            InvalidOption: ``max_new_tokens`` exceeds the positions left after the prompt, or ``num_beams`` exceeds
                the slots.
        """
        if num_beams > self.max_beams:
            raise InvalidOption(
                "num_beams", f"be at most {self.max_beams}, the rows of this server's largest bucket"
            )
        if prompt_tokens > self.max_prompt_tokens:
            raise PromptTooLong(
                f"The prompt has {prompt_tokens} tokens; send at most {self.max_prompt_tokens} tokens."
            )
        room = self._room(prompt_tokens)
        if wanted is not None and wanted > room:
            raise InvalidOption("max_new_tokens", f"be at most {room}, what the model holds after the prompt")

    def new_tokens(self, prompt_tokens: int, wanted: int | None) -> int:
        """Number of tokens to generate: ``wanted`` or the default, but no more than the cache has room for."""
        counted = prompt_tokens if self.default_counts_prompt else 0
        return min(wanted or max(self.default_new_tokens - counted, 1), self._room(prompt_tokens))

    def prefilled(self, prompt_tokens: int) -> int:
        """Number of tokens, of the start token and the prompt together, that are read with the image. The last
        token is never among them, because the first decode step begins with it."""
        return min(prompt_tokens, self.prompt_read)

    def _room(self, prompt_tokens: int) -> int:
        # transformers' max_length counts the start token too. A further token would have no position of its own: it
        # would read the prompt token, or the random number, of the position before it.
        return self.cache_length - 1 - prompt_tokens
