"""Batches the results of an engine's turn into one message, sent at its end."""

from collections.abc import Callable
from concurrent.futures import Future

from snapcap.service.engine.remote.messages import Turn
from snapcap.service.engine.request import Completion
from snapcap.service.errors import EngineFailed, ServiceError

_MOST_STEPS = 64


class Turns:
    """An `EngineObserver` that sends at most one message a turn, because each message costs a system call and wakes
    the event loop of the HTTP process. Counts and durations wait until a result has to be sent. Only the device
    thread may call it."""

    def __init__(self, send: Callable[[Turn], object]) -> None:
        self._send = send
        self._turn = Turn.of()
        self._generated = 0

    def queue_waited(self, seconds: float) -> None:
        self._turn.waited.append(seconds)

    def encoded(self, bucket: int, rows: int, seconds: float) -> None:
        self._turn.encoded.append((bucket, rows, seconds))

    def decode_stepped(self, bucket: int, rows: int, seconds: float) -> None:
        self._turn.stepped.append((bucket, rows, seconds))

    def tokens_generated(self, count: int) -> None:
        self._generated += count

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
        if turn.admitted or turn.tokens or turn.completed or turn.failed or len(turn.stepped) >= _MOST_STEPS:
            self._send(turn._replace(generated=self._generated))
            self._turn, self._generated = Turn.of(), 0
