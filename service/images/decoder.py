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
    """Holds an image to decode. `deadline`: the moment of `time.monotonic` at which the request expires. `left`
    returns whether the client has left. `account` counts the image's bytes until the decoder is done with the
    image."""

    data: bytes
    request_id: str
    deadline: float
    left: Callable[[], bool]
    account: BodyAccount | None = None

    def given_up(self, now: float) -> Exception | None:
        """Returns the outcome if the image need not be decoded, because its client has left or its deadline has
        passed; else None."""
        if self.left():
            return NotWanted()
        return DeadlineExceeded() if now >= self.deadline else None


@dataclass(frozen=True)
class DecodedImage:
    """Holds a decoded image: its pixels as uint8 [H, W, 3] or in a slot of the shared pixels, and its file's
    format. `began` is a moment of `time.monotonic`; `seconds` is the time that decoding took."""

    pixels: "np.ndarray[Any, np.dtype[np.uint8]] | FilledSlot"
    format: str
    began: float
    seconds: float


class UnreadableImage(NamedTuple):
    """Describes an image that cannot be used. `reason` is a label for metrics. `sentence` says why or what to do,
    without capital and full stop."""

    reason: str
    sentence: str


class NotWanted(Exception):  # noqa: N818  not an error
    """Reports that the client left before the image was decoded, so decoding was not begun or not completed."""


ImageResult: TypeAlias = DecodedImage | UnreadableImage | Exception
Done: TypeAlias = Callable[[ImageResult], bool]


class ImageDecoder(Protocol):
    """Decodes images: in threads (`ThreadImageDecoder`) or in processes (`ProcessImageDecoder`)."""

    def decode(self, encoded: EncodedImage, done: Done) -> None:
        """Returns at once, and later calls `done` once with the outcome, on any thread.

        `done` returns whether it has taken over the pixels. If it has not, the decoder reuses their memory.
        """


def too_large(needed: int, most: int) -> UnreadableImage:
    """Returns the outcome for an image that takes more memory than any image may. `needed` and `most` are in
    bytes."""
    sentence = (
        f"the image takes about {_mebibytes(needed)} MiB of memory to be decoded, over the limit of "
        f"{_mebibytes(most)} MiB; scale it down, or send it as baseline JPEG"
    )
    return UnreadableImage("too_large", sentence)


def _mebibytes(size: int) -> int:
    return -(-size >> 20)
