"""Receives what the parent of the decode processes tells the HTTP process, with the files that it passes on."""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from snapcap.service.images.processes.messages import Began, Notice, NoticeReader, Setup
from snapcap.service.ipc.framing import RECEIVE_BYTES, pack

_FILES = 2  # that come with `Began`: the socket to the process, and the file of its pixels
_logger = logging.getLogger("snapcap.decode")


class NoticeChannel:
    """Calls on the event loop: `began` for a decode process that has begun, with its socket and the file of its
    pixels; `said` for every other notice of their parent; `gone` when the parent has ended."""

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        began: Callable[[Began, socket.socket, int], object],
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
        self._files: deque[int] = deque()
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
        self._end.close()
        while self._files:
            os.close(self._files.popleft())

    def _receive(self) -> None:
        try:
            data, files, _, _ = socket.recv_fds(self._end, RECEIVE_BYTES, _FILES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, files = b"", []
        if len(files) == _FILES:
            self._files += files
        else:  # this process may open no more files
            for each in files:
                os.close(each)
        if not data:
            self._loop.remove_reader(self._end)
            self._gone()
            return
        for notice in self._reader.feed(data):
            if not isinstance(notice, Began):
                self._said(notice)
            elif self._files:
                for each in self._files:
                    os.set_inheritable(each, False)  # which Python leaves to whoever receives them
                end = socket.socket(fileno=self._files.popleft())
                self._began(notice, end, self._files.popleft())
            else:  # the process finds its socket closed: it ends, and is replaced
                _logger.warning("no socket to a decode process", extra={"fields": {"pid": notice.pid}})
                self._said(notice)
