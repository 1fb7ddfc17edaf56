"""Packs messages between processes of the server into bytes, and unpacks them again.

Messages are pickles: both ends are the same program, and no other process can reach the socket pair between them.
"""

import os
import pickle
import socket
import struct
from typing import Any, Generic, TypeVar

M = TypeVar("M")

_LENGTH = struct.Struct("=I")
# Most bytes to receive at once, more than the messages of one turn of the event loop. For twice as many bytes the
# allocator would call the system each time, which takes five times as long as to receive a message.
RECEIVE_BYTES = 1 << 16


def pack(message: object) -> bytes:
    """Returns a pickled message behind its length."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def receive_message(end: socket.socket, files: list[int]) -> Any:
    """Waits for one message and reads no byte of the next. Appends the descriptors that came with it to ``files``.

    Raises:
        EOFError: the other end was closed before the message was complete.
    """
    (length,) = _LENGTH.unpack(_exactly(end, _LENGTH.size, files))
    return pickle.loads(_exactly(end, length, files))  # noqa: S301  the sender is this program


def _exactly(end: socket.socket, size: int, files: list[int]) -> bytes:
    data = b""
    while len(data) < size:
        part, some, _, _ = socket.recv_fds(end, size - len(data), 1)
        if not part:
            raise EOFError("the other end is closed")
        data += part
        for each in some:
            os.set_inheritable(each, False)  # descriptors that Python opens are not inheritable either
        files += some
    return data


def receive(end: socket.socket) -> bytes | None:
    """Returns the bytes that have arrived, without waiting: None if there are none yet, b"" if the other end is
    closed."""
    try:
        return end.recv(RECEIVE_BYTES)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""


class Unpacker(Generic[M]):
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[M]:
        held, at = self._held, 0
        messages: list[M] = []
        held += data
        while len(held) - at >= _LENGTH.size:
            end = at + _LENGTH.size + _LENGTH.unpack_from(held, at)[0]
            if end > len(held):
                break
            # The sender is this program.
            messages.append(pickle.loads(memoryview(held)[at + _LENGTH.size : end]))  # noqa: S301
            at = end
        del held[:at]
        return messages
