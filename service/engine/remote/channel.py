"""Carries messages over the engine process's end of the socket to the HTTP process, with blocking calls.

The HTTP process's end is in `loop_channel.py`, because the engine process imports no asyncio.
"""

import socket
import threading
from contextlib import suppress

from snapcap.service.engine.remote.messages import Message
from snapcap.service.ipc.framing import RECEIVE_BYTES, Unpacker, pack


class BlockingChannel:
    """Sends and receives messages. `send` blocks until the socket has room, `receive` until bytes arrive."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()
        self._unpacker: Unpacker[Message] = Unpacker()

    def send(self, message: Message) -> None:
        """Sends a message, from any thread. Drops it if the other end is closed: this process then ends soon
        too."""
        data = pack(message)
        with self._lock, suppress(OSError):
            self._end.sendall(data)

    def receive(self) -> list[Message] | None:
        """Returns the messages that are complete, which may be none; returns None once the other end is closed."""
        try:
            data = self._end.recv(RECEIVE_BYTES)
        except ConnectionError:
            return None
        return self._unpacker.feed(data) if data else None
