"""Defines a caption request, its completion, and the protocol of an engine that takes it. Imports no torch."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from snapcap.models.dataclass import dataclass
from snapcap.service.engine.limits import Limits
from snapcap.service.errors import EngineFailed
from snapcap.service.ipc.shared_pixels import FilledSlot
from snapcap.warmup.runtime.slot_request import SamplingParams

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length"]
_logger = logging.getLogger("snapcap.engine")


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

    ``pixels`` is uint8 [height, width, 3] at the model's size, or, for the engine of another process, the slot of
    shared memory that holds the pixels already. ``deadline`` is a moment of ``time.monotonic``. Cancelling the
    future drops the request, whether it waits or runs.

    ``on_token``, for a reply that is streamed, is called on the device thread with each token of the completion
    as it is generated, before the future gets its result. ``on_admitted`` is called on the device thread when the
    device has been given the pixels, which are not read afterwards. All rows wait for both callbacks, so a callback
    only hands its argument on. An exception of a callback fails this request alone.

    ``prompt_ids`` are the tokens that the caption begins with; ``text_ids`` the tokens that the encoder reads
    beside the image.
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
        """Returns the pixels, which only the engine of this process may ask for."""
        if isinstance(self.pixels, FilledSlot):
            raise TypeError("these pixels are in a slot of the shared memory, for the engine of another process")
        return self.pixels

    def admitted(self) -> None:
        """Calls ``on_admitted``."""
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
        """Takes over the request and its pixels; the result or an exception arrives in the request's future.

        Raises EngineChannelFull or NotReady, and then has taken over neither."""
