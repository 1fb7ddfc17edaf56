"""Receives the notices of the decode processes' parent in the HTTP process, with the files that come with them."""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from snapcap.service.images.processes.messages import Began, Notice, NoticeReader, Setup
from snapcap.service.ipc.framing import RECEIVE_BYTES, pack

_FILES = 2  # `Began` carries two: the socket to the process, and the file of its pixels
_logger = logging.getLogger("snapcap.decode")


class NoticeChannel:
    """Receives notices on the event loop. Calls `began` for a new decode process, with its socket and the file of
    its pixels; `said` for every other notice; `gone` when the parent has ended."""

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
        """Sends the setup from any thread, without waiting: it is the only message to the parent and fits the
        socket's buffer."""
        with suppress(OSError):  # the parent has ended; the end of file follows
            self._end.sendall(pack(setup))

    def close(self) -> None:
        """Stops receiving notices, on the event loop."""
        self._loop.remove_reader(self._end)
        self.shut()

    def shut(self) -> None:
        """Closes the socket and the received files after the event loop has stopped."""
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
        else:  # the files are incomplete, because this process has too many open files
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
                    os.set_inheritable(each, False)  # received files are inheritable unless this is set
                end = socket.socket(fileno=self._files.popleft())
                self._began(notice, end, self._files.popleft())
            else:  # this process closed the socket of the decode process, which therefore ends and is replaced
                _logger.warning("no socket to a decode process", extra={"fields": {"pid": notice.pid}})
                self._said(notice)
