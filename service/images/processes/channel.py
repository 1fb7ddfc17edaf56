"""Sends images to one decode process and receives its answers, on the HTTP process's event loop."""

import asyncio
import socket
from collections.abc import Callable

from snapcap.service.images.processes.messages import HEAD, Answer, AnswerReader, BadAnswer
from snapcap.service.ipc.framing import receive


class WorkerChannel:
    """One image at a time, and its answer, on the event loop. Nobody waits: what the socket has no room for is sent
    when there is."""

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        answered: Callable[[Answer], object],
        misbehaved: Callable[[BadAnswer], object],
        ended: Callable[[], object],
    ) -> None:
        """`misbehaved`: called where the process sends bytes that no decode process of ours would. `ended`: called
        when the process has closed its socket; nothing is called after it."""
        end.setblocking(False)
        self._end = end
        self._loop = loop
        self._answered = answered
        self._misbehaved = misbehaved
        self._ended = ended
        self._reader = AnswerReader()
        self._rest = memoryview(b"")
        loop.add_reader(end, self._receive)

    def send(self, image: bytes, room: int) -> bool:
        """Whether there is somebody to send it to. The last one must have been answered."""
        head = HEAD.pack(len(image), room)
        try:
            sent = self._end.sendmsg((head, image))
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:  # the process has ended, which is about to be heard
            return False
        if sent < len(head) + len(image):
            whole, begun = (image, sent - len(head)) if sent >= len(head) else (head + image, sent)
            self._rest = memoryview(whole)[begun:]
            self._loop.add_writer(self._end, self._room)
        return True

    def end(self) -> None:
        """The process has ended, as its parent says: take its last answer, and close. A child that it forked may
        hold its end of the socket, so that no end of file would come."""
        if self._receive():
            self.close()
            self._ended()

    def close(self) -> None:
        """The other process ends when it is done with what it has. Nothing is heard of it."""
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self.shut()

    def shut(self) -> None:
        """As `close`, once the event loop is over."""
        self._end.close()

    def _receive(self) -> bool:
        """Whether the socket is still open at the other end."""
        data = receive(self._end)
        if data is None:
            return True
        if not data:
            self.close()
            self._ended()
            return False
        try:
            for answer in self._reader.feed(data):
                self._answered(answer)
        except BadAnswer as error:
            self._reader = AnswerReader()
            self._misbehaved(error)
        return True

    def _room(self) -> None:
        try:
            sent = self._end.send(self._rest)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            sent = len(self._rest)
        self._rest = self._rest[sent:]
        if not self._rest:
            self._rest = memoryview(b"")  # an empty part of the image would hold all of it
            self._loop.remove_writer(self._end)
