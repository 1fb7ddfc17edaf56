"""Defines a caption request, its limits and its completion, and the protocol of an engine that takes it.

This module imports no torch.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import MAX_BEAMS
from snapcap.service.errors import EngineFailed, InvalidOption, PromptTooLong
from snapcap.warmup.runtime.slot_request import SamplingParams

if TYPE_CHECKING:
    import numpy as np

_logger = logging.getLogger("snapcap.engine")


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

    @property
    def most_ahead(self) -> int:
        """Number of tokens that may stand before the image. An encode reads them all, and the start token."""
        return max(self.prompt_read - 1, 0)

    def check(self, prompt_tokens: int, wanted: int | None, num_beams: int = 1, ahead: int = 0) -> None:
        """Refuses a request that the caches cannot hold, before it costs anything. Raises PromptTooLong if no
        position is left to generate into, or ``ahead`` tokens before the image are more than an encode reads, and
        InvalidOption if ``max_new_tokens`` exceeds the positions left after the prompt, or ``num_beams`` exceeds
        the slots."""
        if num_beams > self.max_beams:
            raise InvalidOption(
                "num_beams", f"be at most {self.max_beams}, the rows of this server's largest bucket"
            )
        if prompt_tokens > self.max_prompt_tokens:
            raise PromptTooLong(
                f"The prompt has {prompt_tokens} tokens; send at most {self.max_prompt_tokens} tokens."
            )
        if ahead > self.most_ahead:
            raise PromptTooLong(
                f"The texts before the image have {ahead} tokens with the template's; send at most "
                f"{self.most_ahead} tokens, or start the server with --text-tokens {ahead + 1}."
            )
        room = self._room(prompt_tokens)
        if wanted is not None and wanted > room:
            raise InvalidOption("max_new_tokens", f"be at most {room}: the model can hold no more after the prompt")

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


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Completion:
    """The generated tokens (without prompt, start and end), the reason of their end, and the seconds spent waiting,
    encoding and decoding."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    backend: str
    queue_s: float
    encode_s: float
    decode_s: float


@dataclass(frozen=True, eq=False)
class CaptionRequest:
    """A request to caption one image. The result or an exception arrives in ``future``.

    ``pixels`` is uint8 [height, width, 3] at the model's size, or, for the engine of another process, the number of
    the slot of shared memory that holds the pixels already. ``deadline`` is a moment of ``time.monotonic``.
    Cancelling the future drops the request, whether it waits or runs.

    ``on_token``, for a reply that is streamed, is called on the device thread with each token of the completion
    as it is generated, before the future gets its result. ``on_admitted`` is called on the device thread when the
    device has been given the pixels, which are not read afterwards. All rows wait for both callbacks, so a callback
    only hands its argument on. An exception of a callback fails this request alone.

    ``prompt_ids`` are the tokens that the caption begins with; ``text_ids`` the tokens that the encoder reads
    beside the image; ``ahead`` how many of the first ``prompt_ids`` stand before the image."""

    id: str
    pixels: "np.ndarray[Any, np.dtype[np.uint8]] | int"
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    deadline: float
    future: "Future[Completion]"
    on_token: Callable[[int], None] | None = None
    on_admitted: Callable[[], None] | None = None
    text_ids: tuple[int, ...] = ()
    ahead: int = 0

    @property
    def array(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Returns the pixels, which only the engine of this process may ask for."""
        if isinstance(self.pixels, int):
            raise TypeError("these pixels are in a slot of the shared memory, for the engine of another process")
        return self.pixels

    def admitted(self) -> None:
        if self.on_admitted is not None:
            self._call(self.on_admitted)

    def generated(self, token: int) -> bool:
        """Calls ``on_token``. Returns whether the request still wants tokens."""
        return self.on_token is None or self._call(self.on_token, token)

    def fail(self, error: Exception) -> None:
        """Gives the future an exception, unless the request has ended or its client has left."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    def _call(self, callback: Callable[..., None], *values: int) -> bool:
        try:
            callback(*values)
        except Exception:
            _logger.exception("a callback failed", extra={"fields": {"request_id": self.id}})
            self.fail(EngineFailed())
            return False
        return True

    def within(self, rows: int) -> "CaptionRequest":
        """Returns the request with at most ``rows`` beams, unless the client itself asked for more.

        A narrower search is better than one that waits for a cold bucket, or fails with that bucket."""
        if not self.params.fewer_beams or self.params.num_beams <= rows:
            return self
        return replace(self, params=replace(self.params, num_beams=rows))


class CaptionEngine(Protocol):
    """Takes requests: the engine of this process, or the client of the engine process."""

    @property
    def limits(self) -> Limits: ...

    def submit(self, request: CaptionRequest) -> None:
        """Takes over the request and its pixels; the result or an exception arrives in the request's future. Raises
        EngineChannelFull or NotReady, and then has taken over neither."""
