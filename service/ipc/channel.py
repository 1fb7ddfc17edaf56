"""Exchanges messages with another process on the event loop of the HTTP process."""

import asyncio
import errno
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic

from snapcap.service.ipc.framing import RECEIVE_BYTES, M, Unpacker, pack, receive
from snapcap.service.limits import ENGINE_CHANNEL_BYTES


class LoopChannel(Generic[M]):
    """Sends and receives messages without blocking. The event loop calls `take` with each message that arrives, and
    sends the bytes that the socket had no room for. `gone` is called when the other process has closed its end."""

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[M], object],
        gone: Callable[[], object] = lambda: None,
    ) -> None:
        end.setblocking(False)
        self._end = end
        self._loop = loop
        self._take = take
        self._gone = gone
        self._unpacker: Unpacker[M] = Unpacker()
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._full = False
        self._left = False
        loop.add_reader(end, self.receive)

    @property
    def has_room(self) -> bool:
        """Tells if fewer bytes wait to be sent than may."""
        return len(self._waiting) < ENGINE_CHANNEL_BYTES

    def send(self, message: object) -> None:
        """Sends a message, or keeps its bytes until the socket has room. May be called from any thread."""
        data = pack(message)
        with self._lock:
            if self._left:
                return
            self._waiting += data
            if not self._full:
                self._send_waiting()
                if self._waiting:
                    self._full = True
                    with suppress(RuntimeError):  # the loop has been closed: the process ends
                        self._loop.call_soon_threadsafe(self._await_room)

    def receive(self) -> None:
        """Reads all messages that have arrived, on the event loop."""
        while (data := self._arrived()) is not None:
            if not data:
                self._loop.remove_reader(self._end)
                self._gone()
                return
            for message in self._unpacker.feed(data):
                self._take(message)
            if len(data) < RECEIVE_BYTES:
                return

    def close(self) -> None:
        """Shuts the socket down, which tells the other process to end. Called when the event loop is over, or after
        `leave`."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Stops to send and to receive, on the event loop."""
        with self._lock:
            self._waiting.clear()
            self._left = True
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)

    def _arrived(self) -> bytes | None:
        """Returns the bytes that have arrived, as `receive` does."""
        return receive(self._end)

    def _await_room(self) -> None:
        if not self._left:
            self._loop.add_writer(self._end, self._room)

    def _room(self) -> None:
        with self._lock:
            if self._left:
                return
            self._send_waiting()
            if not self._waiting:
                self._full = False
                self._loop.remove_writer(self._end)

    def _send_waiting(self) -> None:
        try:
            sent = self._end.send(self._waiting)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            if error.errno in (errno.ENOBUFS, errno.ENOMEM):  # the event loop tries again
                return
            sent = len(self._waiting)  # the other process has ended: the end of file follows
        del self._waiting[:sent]
