"""What passes between the HTTP side and the device thread. No torch."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol

from snapcap.service.engine.limits import Limits
from snapcap.service.ipc.shared_pixels import FilledSlot
from snapcap.warmup.runtime.slot_request import EarlyStopping

if TYPE_CHECKING:
    import numpy as np

    from snapcap.service.captioning.options import CaptionOptions

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen: temperature 0 is greedy, ``top_k`` 0 keeps all tokens.

    ``max_new_tokens`` None is the model's default; ``seed`` None draws one. ``num_beams`` above 1 is a beam search,
    which takes as many slots; the fields after it are transformers' options of these names.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, options: "CaptionOptions") -> "SamplingParams":
        """What a client asked for, as far as it is about tokens."""
        return cls(*_chosen(options))


# Looked up once: every request asks.
_chosen = attrgetter(*(each.name for each in fields(SamplingParams)))


@dataclass(frozen=True)
class Completion:
    """Generated tokens (without prompt, start and end), why they end, and where the seconds went."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    backend: str
    queue_s: float
    encode_s: float
    decode_s: float


@dataclass(frozen=True, eq=False)
class CaptionRequest:
    """One image on its way to a slot; the result or an exception arrives in ``future``.

    ``pixels`` is uint8 [height, width, 3] at the model's size, or, for the engine of another process, the slot of
    the shared memory that has them already. ``deadline`` is a moment of ``time.monotonic``. Cancelling the future
    drops the request, waiting or running.

    ``on_token``, for a reply that is streamed, is called on the device thread with each token of the completion
    as it is generated, before the future gets its result. All rows wait for it, so it only hands the token on, and
    an exception from it would fail them all. Of ``on_admitted`` this is true as well: it is called when the device
    has been given the pixels, and nobody looks at them any more.
    """

    id: str
    pixels: "np.ndarray[Any, np.dtype[np.uint8]] | FilledSlot"
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    deadline: float
    future: "Future[Completion]"
    on_token: Callable[[int], None] | None = None
    on_admitted: Callable[[], None] | None = None

    @property
    def array(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """The pixels, for the engine of this process."""
        if isinstance(self.pixels, FilledSlot):
            raise TypeError("these pixels are in a slot of the shared memory, for the engine of another process")
        return self.pixels


class CaptionEngine(Protocol):
    """What takes requests: the engine of this process, or what sends them to that of another."""

    @property
    def limits(self) -> Limits: ...

    def submit(self, request: CaptionRequest) -> None:
        """Takes the request and its pixels over. Raises Overloaded, NotReady; then it has not. What comes of the
        request arrives in its future."""
