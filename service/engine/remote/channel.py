"""Carries messages at the engine process's end of the socket to the HTTP process, with blocking calls.

The HTTP process's end is in `loop_channel.py`: this process imports no asyncio.
"""

import socket
import threading
from contextlib import suppress

from snapcap.service.engine.remote.messages import Message
from snapcap.service.ipc.framing import RECEIVE_BYTES, Unpacker, pack


class BlockingChannel:
    """Who sends waits for room, and who receives for a message."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()
        self._unpacker: Unpacker[Message] = Unpacker()

    def send(self, message: Message) -> None:
        """From any thread. Without another end nothing happens: this process is about to end, too."""
        data = pack(message)
        with self._lock, suppress(OSError):
            self._end.sendall(data)

    def receive(self) -> list[Message] | None:
        """All that has come, which may be no whole message yet; None once the other end is closed."""
        try:
            data = self._end.recv(RECEIVE_BYTES)
        except ConnectionError:
            return None
        return self._unpacker.feed(data) if data else None
