"""Runs in the engine process: submits the HTTP process's requests to the engine, and sends back what it does."""

import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from snapcap.service.engine.remote.messages import Message, Submit, Turn
from snapcap.service.engine.request import CaptionRequest, Completion
from snapcap.service.errors import EngineFailed, NotReady, ServiceError
from snapcap.service.ipc.framing import RECEIVE_BYTES, Unpacker, pack
from snapcap.service.ipc.shared_pixels import SharedPixels
from snapcap.service.telemetry.work import Work

if TYPE_CHECKING:
    from snapcap.service.engine.engine import Engine


class BlockingChannel:
    """Sends and receives messages. `send` blocks until the socket has room, `receive` until bytes arrive."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()
        self._unpacker: Unpacker[Message] = Unpacker()

    def send(self, message: Message) -> None:
        """Sends a message, from any thread. Drops it if the other end is closed: this process then ends too."""
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


_MOST_STEPS = 64


class Turns:
    """Observes an engine, and sends at most one message a turn, because each message costs a system call and wakes
    the event loop of the HTTP process. Counts and durations wait until a result has to be sent. Only the device
    thread may call it."""

    def __init__(self, send: Callable[[Turn], object]) -> None:
        self._send = send
        self._turn = Turn.of()

    def observe(self, work: Work) -> None:
        self._turn.works.append(work)

    def admitted(self, number: int) -> None:
        """Reports that the pixels of a request are not needed any more."""
        self._turn.admitted.append(number)

    def token(self, number: int, token: int) -> None:
        """Reports a generated token of a request that streams."""
        self._turn.tokens.append((number, token))

    def done(self, number: int, future: "Future[Completion]") -> None:
        """Reports the result or the exception of a request."""
        error = future.exception()
        if error is None:
            self._turn.completed.append((number, future.result()))
        else:
            self._turn.failed.append((number, error if isinstance(error, ServiceError) else EngineFailed()))

    def end(self) -> None:
        """Sends the turn's message if it has something that a request waits for, or many counts have collected."""
        turn = self._turn
        if turn.admitted or turn.tokens or turn.completed or turn.failed or len(turn.works) >= _MOST_STEPS:
            self._send(turn)
            self._turn = Turn.of()


_logger = logging.getLogger("snapcap.engine")


class EngineServer:
    """Hands requests to the engine and sends back their results.

    `turns.end` must be called at the end of each turn of the engine. `submit` and `cancel` are called by one
    thread."""

    def __init__(self, pixels: SharedPixels, send: Callable[[Turn], object]) -> None:
        self.turns = Turns(send)
        self._pixels = pixels
        self._send = send
        self._engine: Engine | None = None
        self._futures: dict[int, Future[Completion]] = {}

    def attach(self, engine: "Engine") -> None:
        """Sets the engine that gets all later requests."""
        self._engine = engine

    def submit(self, message: Submit) -> None:
        """Queues a request whose pixels are in shared memory. An error fails this request alone."""
        number, future = message.number, Future[Completion]()
        self._futures[number] = future
        future.add_done_callback(partial(self._done, number))
        try:
            request = CaptionRequest(
                message.request_id,
                self._pixels.read(message.slot),
                message.prompt_ids,
                message.params,
                message.deadline,
                future,
                partial(self.turns.token, number) if message.streams else None,
                partial(self.turns.admitted, number),
                message.text_ids,
                message.ahead,
            )
            if self._engine is not None:
                self._engine.submit(request)
        except Exception as error:
            del self._futures[number]
            told: ServiceError = EngineFailed()
            if isinstance(error, NotReady):  # the engine stops, or has failed and the HTTP process hears of it
                told = error
            else:
                _logger.exception("request fails alone", extra={"fields": {"request_id": message.request_id}})
            self._send(Turn.of(failed=[(number, told)]))

    def cancel(self, number: int) -> None:
        """Cancels a request whose client has left. Does nothing if the request has ended."""
        future = self._futures.get(number)
        if future is not None:
            future.cancel()

    def _done(self, number: int, future: "Future[Completion]") -> None:
        del self._futures[number]
        if not future.cancelled():
            self.turns.done(number, future)
