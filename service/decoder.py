"""What turns bytes into pixels, as who asks it sees it: threads of this process, or processes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from service.shared_pixels import FilledSlot

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Picture:
    """A picture for the encoder: uint8 [H, W, 3] here or in a slot of the shared pixels, and its file's format.
    `began` is a moment of `time.monotonic`, `seconds` what it took."""

    pixels: "np.ndarray[Any, np.dtype[np.uint8]] | FilledSlot"
    format: str
    began: float
    seconds: float


class Unreadable(NamedTuple):
    """An image that cannot be used: a label for metrics, and what to do, without capital and full stop."""

    reason: str
    sentence: str


class NotWanted(Exception):  # noqa: N818  not an error
    """Nobody waits for this picture, so it was not decoded."""


Outcome: TypeAlias = Picture | Unreadable | Exception
Done: TypeAlias = Callable[[Outcome], bool]


class Decoder(Protocol):
    """There are two: `ThreadDecoder` and `ProcessDecoder`."""

    def decode(self, image: bytes, left: Callable[[], bool], done: Done) -> None:
        """Return at once, and call `done` with what comes of it, once, on whatever thread that is known.

        `left`: whether nobody waits for it any more; it is then not begun. `done` says whether it has taken the
        pixels over, which are the decoder's to use again otherwise."""
