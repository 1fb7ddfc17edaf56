"""Defines a caption request, its completion, and the protocol of an engine that takes it. No torch."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from snapcap.models.dataclass import dataclass
from snapcap.service.engine.limits import Limits
from snapcap.service.ipc.shared_pixels import FilledSlot
from snapcap.warmup.runtime.slot_request import SamplingParams

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length"]


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

    ``prompt_ids``: what the caption begins with; ``text_ids``: what the encoder reads beside the image.
    """

    id: str
    pixels: "np.ndarray[Any, np.dtype[np.uint8]] | FilledSlot"
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    deadline: float
    future: "Future[Completion]"
    on_token: Callable[[int], None] | None = None
    on_admitted: Callable[[], None] | None = None
    text_ids: tuple[int, ...] = ()

    @property
    def array(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """The pixels, for the engine of this process."""
        if isinstance(self.pixels, FilledSlot):
            raise TypeError("these pixels are in a slot of the shared memory, for the engine of another process")
        return self.pixels

    def within(self, rows: int) -> "CaptionRequest":
        """With as many beams as there are rows, where nobody asked for more: a search that waits for a bucket which
        is cold, or fails with it, is worse than a narrower one."""
        if not self.params.fewer_beams or self.params.num_beams <= rows:
            return self
        return replace(self, params=replace(self.params, num_beams=rows))


class CaptionEngine(Protocol):
    """What takes requests: the engine of this process, or what sends them to that of another."""

    @property
    def limits(self) -> Limits: ...

    def submit(self, request: CaptionRequest) -> None:
        """Takes the request and its pixels over. Raises EngineChannelFull, NotReady; then it has not. What comes of
        the request arrives in its future."""
