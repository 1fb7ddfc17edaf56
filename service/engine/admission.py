"""Admits requests to the queue, or refuses them.

The process that answers clients does so, and nothing behind it counts again.

    head of a request ─▶ permit ─▶ body, image fetched ─▶ decoded ─▶ waits for the device ─▶ row
                         refused if no place is free      a place for each image ············┘ free again

A request has its place once its image is here, and not while its client sends it: else a hundred clients a second
who send a head and no more would have all places. What is on its way is bounded by connections and by the memory of
bodies. One that finds the queue full by then is refused after all.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from snapcap.service.errors import TooManyImages
from snapcap.service.limits import QueueFull

# Seconds after which a completion says nothing any more about how fast the queue is served.
_RECENT_S = 30.0


class Pace:
    """How fast a queue is served: the moments of the last completions."""

    def __init__(self) -> None:
        self._completed: deque[float] = deque(maxlen=32)

    def completed(self, moment: float) -> None:
        self._completed.append(moment)

    def retry_after(self, waiting: int, now: float) -> float:
        """Seconds until so many requests have gone at the rate of the last; 1 when that is not known."""
        # A copy: another thread may append meanwhile.
        moments = [moment for moment in list(self._completed) if now - moment <= _RECENT_S]
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

    @property
    def taken(self) -> int:
        """Places that are not free."""
        return self._taken

    def admit(self) -> "Permit":
        """A permit that has no place yet. Raises QueueFull where none is free."""
        if self._taken >= self.capacity:
            raise self._full()
        return Permit(self)

    def take(self, permit: "Permit", places: int) -> None:
        """So many more for a permit, all or none. Raises QueueFull."""
        with self._lock:
            if self._taken + places > self.capacity:
                raise self._full()
            self._taken += places
            permit.places += places

    def give_back(self, permit: "Permit", places: int) -> None:
        """So many of a permit, or those that it still has."""
        with self._lock:
            places = min(places, permit.places)
            permit.places -= places
            self._taken -= places

    def completed(self) -> None:
        """A request has its caption: the next who is refused is told to come again at this pace."""
        self._pace.completed(self._clock())

    def _full(self) -> QueueFull:
        return QueueFull(self._pace.retry_after(self.capacity, self._clock()))


class Permit:
    """A request's places in the queue: one for each image that is here and has no row yet. A context manager: what
    it has at the end, however the request has ended, is free again. `places`: how many it has."""

    __slots__ = ("_admission", "places")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.places = 0

    def take(self, images: int = 1) -> None:
        """So many images are here.

        Raises:
            TooManyImages: the whole queue has not as many places.
            QueueFull: not as many are free; the permit has those that it had.
        """
        if images > self._admission.capacity:
            raise TooManyImages(
                f"There are {images} images; send at most {self._admission.capacity} in one request, the size of "
                "this server's queue."
            )
        self._admission.take(self, images)

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
