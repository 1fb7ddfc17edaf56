"""Defines the messages between the HTTP process, the parent of the decode processes, and the decode processes.

A decode process runs codecs on bytes from anywhere. Its answers have a fixed structure, every field of which is
checked, and they are never unpickled. An image is sent to a decode process as raw bytes behind a head. The parent
receives nothing from a decode process, so its notices, and its setup, are pickles as other messages are.
"""

import math
import socket
import struct
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, get_args

from snapcap.models.processing.image_formats import READ, Reason

if TYPE_CHECKING:
    from snapcap.models.processing.transform import ImageTransform

# Head of an image: its number of bytes, and the bytes of memory that decoding it may take.
HEAD = struct.Struct("=QQ")

# Kind, name, began, seconds, width, height, bytes of memory, bytes of text.
_ANSWER = struct.Struct("=BBddIIQH")
_MOST_TEXT = 8_000
_REASONS: tuple[str, ...] = get_args(Reason)
_DECODED, _REFUSED, _BROKEN, _NEEDS = range(4)


class Setup(NamedTuple):
    """Tells the parent how to decode images, once the checkpoint is known. `most`: memory of one image in bytes."""

    transform: "ImageTransform"
    most: int


class Began(NamedTuple):
    """Announces a new decode process. The message carries two open files: the socket to the process and the file
    of its pixels."""

    pid: int


class Ended(NamedTuple):
    """Reports that a decode process has ended. `code`: as `os.waitstatus_to_exitcode` returns it."""

    pid: int
    code: int


class NoneBegan(NamedTuple):
    """Reports that the parent could not start a process; it tries again. `code`: the errno."""

    code: int


class Decoded(NamedTuple):
    """Reports that the image is decoded: the pixels are in the file of the process. `began`: a moment of
    `time.monotonic`. `seconds`: duration of decoding. `size`: (width, height) of the upright image."""

    format: str
    began: float
    seconds: float
    size: tuple[int, int]


class Refused(NamedTuple):
    """Refuses an image that cannot be used, with the reason and sentence of its ImageError."""

    reason: str
    sentence: str


class Broken(NamedTuple):
    """Reports an error that no image should cause, with the end of its traceback as text."""

    trace: str


class Needs(NamedTuple):
    """Reports that an image was not decoded because it needs `size` bytes of memory, more than it was granted."""

    size: int


Notice: TypeAlias = Began | Ended | NoneBegan
Answer: TypeAlias = Decoded | Refused | Broken | Needs


class BadAnswer(Exception):  # noqa: N818  handled where it is caught, so it is not named as an error
    """Reports an answer that no decode process should send."""


def pack_answer(answer: Answer) -> bytes:
    match answer:
        case Decoded(name, began, seconds, size):
            return _ANSWER.pack(_DECODED, READ.index(name), began, seconds, *size, 0, 0)
        case Refused(reason, sentence):
            return _with_text(_REFUSED, _REASONS.index(reason), sentence.encode()[:_MOST_TEXT])
        case Broken(trace):
            return _with_text(_BROKEN, 0, trace.encode()[-_MOST_TEXT:])
        case Needs(size):
            return _ANSWER.pack(_NEEDS, 0, 0.0, 0.0, 0, 0, size, 0)


class AnswerReader:
    """Splits a decode process's stream of bytes into answers."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[Answer]:
        """Adds bytes. Returns the answers that are complete. Raises BadAnswer if an answer is invalid."""
        held, at = self._held, 0
        answers: list[Answer] = []
        held += data
        while len(held) - at >= _ANSWER.size:
            kind, name, began, seconds, width, height, size, length = _ANSWER.unpack_from(held, at)
            if length > _MOST_TEXT:
                raise BadAnswer(f"a text of {length} bytes")
            end = at + _ANSWER.size + length
            if end > len(held):
                break
            text = held[at + _ANSWER.size : end].decode(errors="replace")
            answers.append(_answer(kind, name, began, seconds, (width, height), size, text))
            at = end
        del held[:at]
        return answers


def receive_exactly(end: socket.socket, count: int) -> bytes | None:
    """Returns exactly `count` bytes; None if the stream ends before them."""
    data = end.recv(count, socket.MSG_WAITALL) if count else b""
    if len(data) == count:
        return data
    parts = [data]
    while data and count > (have := sum(map(len, parts))):
        data = end.recv(count - have, socket.MSG_WAITALL)
        parts.append(data)
    return b"".join(parts) if data else None


def _with_text(kind: int, name: int, text: bytes) -> bytes:
    return _ANSWER.pack(kind, name, 0.0, 0.0, 0, 0, 0, len(text)) + text


def _answer(
    kind: int, name: int, began: float, seconds: float, size: tuple[int, int], memory: int, text: str
) -> Answer:
    valid = math.isfinite(began) and 0 <= seconds < math.inf and min(size) > 0
    if kind == _DECODED and name < len(READ) and valid:
        return Decoded(READ[name], began, seconds, size)
    if kind == _REFUSED and name < len(_REASONS):
        return Refused(_REASONS[name], text)
    if kind == _BROKEN:
        return Broken(text)
    if kind == _NEEDS:
        return Needs(memory)
    raise BadAnswer(f"kind {kind}, name {name}, {began} s, {seconds} s, {size} pixels")
