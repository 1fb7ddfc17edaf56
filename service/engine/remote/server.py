"""Submits the HTTP process's requests to the engine of this process, and frees their slots of shared pixels."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from snapcap.service.engine.remote.messages import Submit, Turn
from snapcap.service.engine.remote.turns import Turns
from snapcap.service.engine.request import CaptionRequest, Completion
from snapcap.service.errors import EngineFailed, NotReady, ServiceError
from snapcap.service.ipc.shared_pixels import SharedPixels

if TYPE_CHECKING:
    from snapcap.service.engine.engine import Engine

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
            request = self._request(message, future)
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

    def _request(self, message: Submit, future: "Future[Completion]") -> CaptionRequest:
        number, turns = message.number, self.turns
        return CaptionRequest(
            message.request_id,
            self._pixels.read(message.slot),
            message.prompt_ids,
            message.params,
            message.deadline,
            future,
            partial(turns.token, number) if message.streams else None,
            partial(turns.admitted, number),
            message.text_ids,
        )

    def cancel(self, number: int) -> None:
        """Cancels a request whose client has left. Does nothing if the request has ended."""
        future = self._futures.get(number)
        if future is not None:
            future.cancel()

    def _done(self, number: int, future: "Future[Completion]") -> None:
        del self._futures[number]
        if not future.cancelled():
            self.turns.done(number, future)
