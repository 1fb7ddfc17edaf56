"""Sends images to one decode process and receives its answers, on the HTTP process's event loop."""

import asyncio
import socket
from collections.abc import Callable

from snapcap.service.images.processes.messages import HEAD, Answer, AnswerReader, BadAnswer
from snapcap.service.ipc.framing import receive


class WorkerChannel:
    """Sends one image at a time and receives its answer, on the event loop. No call blocks: bytes that do not fit
    the socket's buffer are sent later."""

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        answered: Callable[[Answer], object],
        misbehaved: Callable[[BadAnswer], object],
        ended: Callable[[], object],
    ) -> None:
        """Starts to receive. `answered`: called with each answer. `misbehaved`: called when the process sends
        invalid bytes. `ended`: called when the process has closed its socket; no call follows it."""
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
        """Sends an image, with `room`, the bytes of memory that it may take. The last image must have been
        answered. Returns False if the process has ended."""
        head = HEAD.pack(len(image), room)
        try:
            sent = self._end.sendmsg((head, image))
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:  # the process has ended; the end of file follows
            return False
        if sent < len(head) + len(image):
            whole, begun = (image, sent - len(head)) if sent >= len(head) else (head + image, sent)
            self._rest = memoryview(whole)[begun:]
            self._loop.add_writer(self._end, self._room)
        return True

    def end(self) -> None:
        """Takes the last answer and closes the socket of a process that has ended. A child that the process forked
        may keep the socket open, so the end of file might never come."""
        if self._receive():
            self.close()
            self._ended()

    def close(self) -> None:
        """Closes the socket and calls no callback any more. The process ends when its present image is done."""
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self.shut()

    def shut(self) -> None:
        """Closes the socket after the event loop has stopped."""
        self._end.close()

    def _receive(self) -> bool:
        """Receives and handles answers. Returns whether the process still has its socket open."""
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
            self._rest = memoryview(b"")  # an empty memoryview of the image would keep the whole image in memory
            self._loop.remove_writer(self._end)
