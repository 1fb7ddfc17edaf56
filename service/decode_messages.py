"""What the HTTP process, the parent of the decode processes and these say to each other.

An image goes to a decode process as its bytes behind a head, since a pickle would copy them; all else is packed as
`messages.py` does it.
"""

import socket
import struct
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from models.preprocess import ImageTransform

HEAD = struct.Struct("=IQ")  # the slot that takes the pixels, and how many bytes follow


class Setup(NamedTuple):
    """To the parent, once the checkpoint is known: what to do with images."""

    transform: "ImageTransform"


class Began(NamedTuple):
    """A decode process is there; the socket to it comes with this message."""

    pid: int


class Ended(NamedTuple):
    """One has ended, though nobody told it to. `code`: as `os.waitstatus_to_exitcode` says it."""

    pid: int
    code: int


class Decoded(NamedTuple):
    """The pixels are in the slot. `began` is a moment of `time.monotonic`, `seconds` what it took."""

    format: str
    began: float
    seconds: float


class Refused(NamedTuple):
    """An image that cannot be used: an ImageError's reason and sentence."""

    reason: str
    sentence: str


class Broken(NamedTuple):
    """An error that is nobody's but ours, with its trace as text."""

    trace: str


Notice: TypeAlias = Began | Ended
Answer: TypeAlias = Decoded | Refused | Broken


def receive_exactly(end: socket.socket, count: int) -> bytes | None:
    """So many bytes; None at the end of the stream, whatever had come of them."""
    data = end.recv(count, socket.MSG_WAITALL) if count else b""
    if len(data) == count:
        return data
    parts = [data]
    while data and count > (have := sum(map(len, parts))):
        data = end.recv(count - have, socket.MSG_WAITALL)
        parts.append(data)
    return b"".join(parts) if data else None
