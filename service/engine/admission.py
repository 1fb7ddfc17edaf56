"""Admits requests to the queue, or refuses them.

The process that answers clients does so, and nothing behind it counts again.

    head of a request ─▶ permit ─▶ body ─▶ image fetched, decoded ─▶ waits for the device ─▶ row
                         a place in the queue, for each image ······························┘ free again

A client that sends its body slowly cannot keep a place from others: when the queue is full, the request whose body
has been on its way for longest gives up its own, unless that is no longer than most bodies take.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from snapcap.service.errors import Overloaded, TooManyImages

# Seconds that a body may be on its way before its request's place may go to another.
PATIENCE_S = 2.0


class QueueFull(Overloaded):
    """As many requests wait as may."""

    code = "queue_full"

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__("The queue is full", retry_after_s)


class Pace:
    """How fast a queue is served: the moments of the last completions."""

    def __init__(self) -> None:
        self._completed: deque[float] = deque(maxlen=32)

    def completed(self, moment: float) -> None:
        self._completed.append(moment)

    def retry_after(self, waiting: int) -> float:
        """Seconds until so many requests have gone at the rate of the last; 1 when that is not known."""
        moments = list(self._completed)
        if len(moments) < 2 or moments[-1] <= moments[0]:
            return 1.0
        rate = (len(moments) - 1) / (moments[-1] - moments[0])
        return min(max(waiting / rate, 1.0), 60.0)


class Admission:
    """The places of the queue, `capacity` of them. From any thread."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self._clock = clock
        self._lock = threading.Lock()
        self._taken = 0
        self._pace = Pace()
        self._receiving: dict[Permit, float] = {}  # since when, the longest first

    @property
    def taken(self) -> int:
        """Places that are not free."""
        return self._taken

    def admit(self) -> "Permit":
        """A permit with one place. Raises QueueFull, which says when to try again."""
        permit = Permit(self)
        try:
            self.take(permit, 1)
        except QueueFull:
            slowest = self._slowest()
            if slowest is None:
                raise
            slowest.withdraw()
            self.take(permit, 1)
        return permit

    def take(self, permit: "Permit", places: int) -> None:
        """So many more for a permit, all or none. Raises QueueFull."""
        with self._lock:
            if self._taken + places > self.capacity:
                raise QueueFull(self._pace.retry_after(self.capacity))
            self._taken += places
            permit.places += places

    def give_back(self, permit: "Permit", places: int) -> None:
        """So many of a permit, or those that it still has."""
        with self._lock:
            places = min(places, permit.places)
            permit.places -= places
            self._taken -= places

    def receiving(self, permit: "Permit") -> None:
        """The body of a request is on its way from now on."""
        with self._lock:
            self._receiving[permit] = self._clock()

    def received(self, permit: "Permit") -> None:
        with self._lock:
            self._receiving.pop(permit, None)

    def _slowest(self) -> "Permit | None":
        """The request whose body has been on its way for longest, if that is longer than it may."""
        with self._lock:
            permit, since = next(iter(self._receiving.items()), (None, 0.0))
            if permit is None or self._clock() - since < PATIENCE_S:
                return None
            del self._receiving[permit]
            return permit

    def completed(self) -> None:
        """A request has its caption: the next who is refused is told to come again at this pace."""
        self._pace.completed(self._clock())


class Permit:
    """A request's places in the queue: one for each image that has no row yet. A context manager: what it has at
    the end, however the request has ended, is free again. `places`: how many it has.
    `withdrawn`: it has lost them to another request."""

    __slots__ = ("_admission", "_stop_receiving", "places", "withdrawn")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._stop_receiving: Callable[[], object] | None = None
        self.places = 0
        self.withdrawn = False

    def receiving(self, stop: Callable[[], object]) -> None:
        """The body is on its way, until `received`. `stop` is called should the place go to another request, from
        the thread that admits that one."""
        self._stop_receiving = stop
        self._admission.receiving(self)

    def received(self) -> None:
        """Raises QueueFull: the place has gone to another request."""
        self._admission.received(self)
        if self.withdrawn:
            raise QueueFull

    def withdraw(self) -> None:
        """The place is another's from now on."""
        self.withdrawn = True
        self.release()
        if self._stop_receiving is not None:
            self._stop_receiving()

    def cover(self, images: int) -> None:
        """Have a place for each of so many images, of which none has been admitted.

        Raises:
            TooManyImages: the whole queue has not as many.
            QueueFull: not as many are free; the permit has those that it had.
        """
        if images > self._admission.capacity:
            raise TooManyImages(
                f"There are {images} images; send at most {self._admission.capacity} in one request, the size of "
                "this server's queue."
            )
        self._admission.take(self, images - self.places)

    def admitted(self) -> None:
        """One of the images has its row on the device: its place is free."""
        self._admission.give_back(self, 1)

    def release(self) -> None:
        """Nothing of the request waits any more. A second time nothing happens."""
        if self.places:
            self._admission.give_back(self, self.places)

    def __enter__(self) -> "Permit":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
