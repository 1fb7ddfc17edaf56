"""Receives what the parent of the decode processes tells the HTTP process, with the sockets that it passes on."""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from snapcap.service.images.processes.messages import Began, Notice, NoticeReader, Setup
from snapcap.service.ipc.framing import RECEIVE_BYTES, pack

_SOCKETS = 64  # that come with what is received at once, at most
_logger = logging.getLogger("snapcap.decode")


class NoticeChannel:
    """What is heard comes on the event loop: a decode process that has begun, with its socket, all else that their
    parent says, and at last that it has ended."""

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        began: Callable[[Began, socket.socket], object],
        said: Callable[[Notice], object],
        gone: Callable[[], object],
    ) -> None:
        end.setblocking(False)
        self._end = end
        self._loop = loop
        self._began = began
        self._said = said
        self._gone = gone
        self._reader = NoticeReader()
        self._sockets: deque[socket.socket] = deque()
        loop.add_reader(end, self._receive)

    def send(self, setup: Setup) -> None:
        """From any thread. The one message to the parent, which its socket has room for."""
        with suppress(OSError):  # it has ended, as is about to be heard
            self._end.sendall(pack(setup))

    def close(self) -> None:
        """Hear nothing more; on the event loop."""
        self._loop.remove_reader(self._end)
        self.shut()

    def shut(self) -> None:
        """As `close`, once the event loop is over."""
        for each in (self._end, *self._sockets):
            each.close()

    def _receive(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._end, RECEIVE_BYTES, _SOCKETS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, descriptors = b"", []
        for each in descriptors:
            os.set_inheritable(each, False)  # which Python leaves to whoever receives them
            self._sockets.append(socket.socket(fileno=each))
        if not data:
            self._loop.remove_reader(self._end)
            self._gone()
            return
        for notice in self._reader.feed(data):
            if not isinstance(notice, Began):
                self._said(notice)
            elif self._sockets:
                self._began(notice, self._sockets.popleft())
            else:  # this process may open no more files: the other one ends, and is replaced
                _logger.warning("no socket to a decode process", extra={"fields": {"pid": notice.pid}})
                self._said(notice)
