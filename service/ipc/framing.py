"""Packs messages between processes of the server into bytes, and unpacks them again.

Pickles, as both ends are one program, and nobody else can reach the pair of sockets between them.
"""

import os
import pickle
import socket
import struct
from typing import Any, Generic, TypeVar

M = TypeVar("M")

_LENGTH = struct.Struct("=I")
# What either end asks the socket for at once: more than a turn's message. For twice as much the allocator would go
# to the system each time, which costs five times as much as to receive a message.
RECEIVE_BYTES = 1 << 16


def pack(message: object) -> bytes:
    """A message behind its length."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def receive_message(end: socket.socket, files: list[int]) -> Any:
    """Wait for one message, and take not a byte of the next one; open files that came with it go to ``files``.

    Raises:
        EOFError: the other end was closed before the message was whole.
    """
    (length,) = _LENGTH.unpack(_exactly(end, _LENGTH.size, files))
    return pickle.loads(_exactly(end, length, files))  # noqa: S301  our other half's


def _exactly(end: socket.socket, size: int, files: list[int]) -> bytes:
    data = b""
    while len(data) < size:
        part, some, _, _ = socket.recv_fds(end, size - len(data), 1)
        if not part:
            raise EOFError("the other end is closed")
        data += part
        for each in some:
            os.set_inheritable(each, False)  # as what a process opens itself
        files += some
    return data


def receive(end: socket.socket) -> bytes | None:
    """What has come, without waiting: None for nothing yet, and no bytes once the other end is closed."""
    try:
        return end.recv(RECEIVE_BYTES)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""


class Unpacker(Generic[M]):
    """Takes bytes as they come, and gives the messages that are whole."""

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
            messages.append(pickle.loads(memoryview(held)[at + _LENGTH.size : end]))  # noqa: S301  our other half's
            at = end
        del held[:at]
        return messages
