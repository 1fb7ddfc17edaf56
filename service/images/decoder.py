"""Defines the protocol of image decoders, which threads and processes implement, with its inputs and outcomes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from snapcap.models.dataclass import dataclass
from snapcap.service.errors import DeadlineExceeded
from snapcap.service.ipc.shared_pixels import FilledSlot
from snapcap.service.memory.bodies import BodyAccount

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class EncodedImage:
    """A picture to decode. `deadline`: a moment of `time.monotonic` after which nobody waits for it. `left`:
    whether nobody does already. `account` has its bytes, which are held until the decoder is done with it."""

    data: bytes
    request_id: str
    deadline: float
    left: Callable[[], bool]
    account: BodyAccount | None = None

    def given_up(self, now: float) -> Exception | None:
        """The outcome when nobody waits any more: it is then not begun."""
        if self.left():
            return NotWanted()
        return DeadlineExceeded() if now >= self.deadline else None


@dataclass(frozen=True)
class DecodedImage:
    """A picture for the encoder: uint8 [H, W, 3] here or in a slot of the shared pixels, and its file's format.
    `began` is a moment of `time.monotonic`, `seconds` what it took."""

    pixels: "np.ndarray[Any, np.dtype[np.uint8]] | FilledSlot"
    format: str
    began: float
    seconds: float


class UnreadableImage(NamedTuple):
    """An image that cannot be used: a label for metrics, and what to do, without capital and full stop."""

    reason: str
    sentence: str


class NotWanted(Exception):  # noqa: N818  not an error
    """Nobody waits for this picture, so it was not decoded, or not to its end."""


ImageResult: TypeAlias = DecodedImage | UnreadableImage | Exception
Done: TypeAlias = Callable[[ImageResult], bool]


class ImageDecoder(Protocol):
    """There are two: `ThreadImageDecoder` and `ProcessImageDecoder`."""

    def decode(self, encoded: EncodedImage, done: Done) -> None:
        """Return at once, and call `done` with what comes of it, once, on whatever thread that is known.

        `done` says whether it has taken the pixels over, which are the decoder's to use again otherwise."""


def too_large(needed: int, most: int) -> UnreadableImage:
    """Of an image that takes more bytes of memory than any may."""
    sentence = (
        f"the image takes about {_mebibytes(needed)} MiB of memory to be decoded, over the limit of "
        f"{_mebibytes(most)} MiB; scale it down, or send it as baseline JPEG"
    )
    return UnreadableImage("too_large", sentence)


def _mebibytes(size: int) -> int:
    return -(-size >> 20)
