"""Carries messages over the HTTP process's end of the socket to the engine process, on the event loop."""

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from snapcap.service.engine.remote.messages import Message
from snapcap.service.ipc.framing import RECEIVE_BYTES, Unpacker, pack, receive
from snapcap.service.limits import ENGINE_CHANNEL_BYTES


class LoopChannel:
    """Sends and receives messages without blocking. The event loop calls `take` with each message that arrives, and
    sends the bytes that the socket had no room for."""

    def __init__(
        self, end: socket.socket, loop: asyncio.AbstractEventLoop, take: Callable[[Message], object]
    ) -> None:
        end.setblocking(False)
        self._end = end
        self._loop = loop
        self._take = take
        self._unpacker: Unpacker[Message] = Unpacker()
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._full = False
        loop.add_reader(end, self.receive)

    @property
    def has_room(self) -> bool:
        """Tells if fewer bytes wait to be sent than may."""
        return len(self._waiting) < ENGINE_CHANNEL_BYTES

    def send(self, message: Message) -> None:
        """Sends a message, or keeps its bytes until the socket has room. May be called from any thread."""
        data = pack(message)
        with self._lock:
            self._waiting += data
            if not self._full:
                self._send_waiting()
                if self._waiting:
                    self._full = True
                    with suppress(RuntimeError):  # the loop has been closed: the process ends
                        self._loop.call_soon_threadsafe(self._loop.add_writer, self._end, self._room)

    def receive(self) -> None:
        """Reads all messages that have arrived, on the event loop."""
        while (data := receive(self._end)) is not None:
            if not data:
                self._loop.remove_reader(self._end)
                return
            for message in self._unpacker.feed(data):
                self._take(message)
            if len(data) < RECEIVE_BYTES:
                return

    def close(self) -> None:
        """Shuts the socket down, which tells the engine process to end. Called when the event loop is over."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def _room(self) -> None:
        with self._lock:
            self._send_waiting()
            if not self._waiting:
                self._full = False
                self._loop.remove_writer(self._end)

    def _send_waiting(self) -> None:
        try:
            sent = self._end.send(self._waiting)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # the engine process has ended, which `EngineClient` notices by itself
            sent = len(self._waiting)
        del self._waiting[:sent]
