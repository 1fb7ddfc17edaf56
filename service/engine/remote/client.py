"""Runs in the HTTP process: sends requests to the engine of the other process, and takes its turns."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import count

from snapcap.models.dataclass import dataclass
from snapcap.service.engine.remote.messages import Cancel, Submit, ToEngine, Turn
from snapcap.service.engine.request import CaptionRequest, Completion, Limits
from snapcap.service.errors import NotReady
from snapcap.service.ipc.shared_pixels import Slots
from snapcap.service.limits import EngineChannelFull
from snapcap.service.telemetry.work import Work


@dataclass(eq=False)
class RemoteEngine:
    """A `CaptionEngine` that sends requests to the engine process. Each request that waits for the device holds a
    slot of the shared pixels.

    ``submit`` is called from any thread, ``take`` and ``fail`` on the event loop. ``observe`` gets the work of the
    engine. ``has_room`` returns whether the channel to the engine process takes more messages."""

    limits: Limits
    slots: Slots
    send: Callable[[ToEngine], object]
    observe: Callable[[Work], object]
    has_room: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count()
        self._sent: dict[int, CaptionRequest] = {}
        self._holding: dict[int, int] = {}  # slot of shared pixels, by number of the request
        self._failed = False

    @property
    def waiting(self) -> bool:
        """Tells if a request was sent whose result has not arrived."""
        return bool(self._sent)

    def submit(self, request: CaptionRequest) -> None:
        """Sends a request; its result or exception arrives in ``request.future``. Raises EngineChannelFull if the
        engine process does not read its messages, NotReady if the engine has ended."""
        slot = request.pixels
        if not isinstance(slot, int):
            raise TypeError("the engine process takes pixels that are in a slot of the shared memory")
        with self._lock:
            if self._failed:
                raise NotReady("failed")
            # A stopped engine process would let messages pile up, of requests whose clients have long left.
            if not self.has_room():
                raise EngineChannelFull
            number = next(self._numbers)
            self._holding[number] = slot
            self._sent[number] = request
        streams = request.on_token is not None
        ids, others = request.prompt_ids, (request.text_ids, request.ahead)
        self.send(Submit(number, request.id, slot, ids, request.params, request.deadline, streams, *others))
        request.future.add_done_callback(partial(self._note_cancelled, number))

    def take(self, turn: Turn) -> None:
        """Completes requests with the results of a turn of the engine."""
        for work in turn.works:
            self.observe(work)
        for number in turn.admitted:
            self._free_slot(number)  # before the queue's place: the request that gets the place needs a slot
            admitted = self._sent.get(number)
            if admitted is not None:
                admitted.admitted()
        for number, token in turn.tokens:
            request = self._sent.get(number)
            if request is not None:
                request.generated(token)
        for number, completion in turn.completed:
            ended = self._forget(number)
            if ended is not None:
                with suppress(InvalidStateError):  # the client left a moment ago
                    ended.future.set_result(completion)
        for number, error in turn.failed:
            self._fail(number, error)

    def fail(self) -> None:
        """Fails all requests that were sent, and refuses new ones, because the engine process has ended."""
        with self._lock:
            self._failed = True
            numbers = list(self._sent)
        for number in numbers:
            self._fail(number, NotReady("failed"))

    def _note_cancelled(self, number: int, future: "Future[Completion]") -> None:
        if future.cancelled() and self._forget(number) is not None:
            self.send(Cancel(number))

    def _fail(self, number: int, error: Exception) -> None:
        request = self._forget(number)
        if request is not None:
            request.fail(error)

    def _forget(self, number: int) -> CaptionRequest | None:
        """Removes a request and frees its slot of shared pixels, even if the engine has not read its `Cancel` yet:
        a result of pixels that another request overwrote by then is discarded."""
        self._free_slot(number)
        return self._sent.pop(number, None)

    def _free_slot(self, number: int) -> None:
        with self._lock:
            slot = self._holding.pop(number, None)
            if slot is not None:
                self.slots.give_back(slot)
