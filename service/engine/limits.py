"""Checks what a request asks for against the slots and the caches. No torch."""

from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import MAX_BEAMS
from snapcap.service.errors import InvalidOption, PromptTooLong


@dataclass(frozen=True)
class Limits:
    """What the caches hold: positions a row (the start token takes the first), tokens generated when a request
    names no number, the ends, and the beams that one request may have: each takes a slot. `forced_end`: a caption
    that is as long as it may be ends with a token of its own. `prompt_read`: a prompt's first tokens, as many, are
    read with the image. `default_counts_prompt`: the tokens of a prompt are among `default_new_tokens`."""

    cache_length: int
    default_new_tokens: int
    eos_ids: frozenset[int]
    max_beams: int = MAX_BEAMS
    forced_end: bool = False
    prompt_read: int = 0
    default_counts_prompt: bool = False

    @property
    def max_prompt_tokens(self) -> int:
        """A prompt leaves at least one position to generate into."""
        return self.cache_length - 2

    def check(self, prompt_tokens: int, wanted: int | None, num_beams: int = 1) -> None:
        """Refuse a request that the caches cannot hold, before it costs anything.

        Raises:
            PromptTooLong: no position is left to generate into.
            InvalidOption: ``max_new_tokens`` is more than what is left after the prompt, or ``num_beams`` more
                than the slots.
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
        """Tokens to generate: what is wanted, or the default, as far as the cache reaches."""
        counted = prompt_tokens if self.default_counts_prompt else 0
        return min(wanted or max(self.default_new_tokens - counted, 1), self._room(prompt_tokens))

    def prefilled(self, prompt_tokens: int) -> int:
        """How many of the start token and the prompt are read with the image: all but the last, which a step begins
        with."""
        return min(prompt_tokens, self.prompt_read)

    def _room(self, prompt_tokens: int) -> int:
        # As transformers' max_length, which also counts the start token. One token more would have no position
        # of its own: it would take the prompt's last token, or the random number, of the position before it.
        return self.cache_length - 1 - prompt_tokens
