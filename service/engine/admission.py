"""Admits requests to the queue, or refuses them.

The HTTP process admits requests. The engine behind it does not count them again.

    head of a request ─▶ permit ─▶ body, image fetched ─▶ decoded ─▶ waits for the device ─▶ row
                         refused if no place is free      a place for each image ············┘ free again

A request takes its place once its image has arrived, not while the client still sends it: otherwise a hundred
clients a second that send a head and nothing else would hold every place. The number of connections and the memory
of bodies bound the requests that are still arriving. A request whose image arrives when the queue is full is
refused.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from snapcap.service.errors import TooManyImages
from snapcap.service.limits import QueueFull

# Seconds after which a completion is too old to count for the rate at which the queue is served.
_RECENT_S = 30.0


class Admission:
    """Hands out the `capacity` places of the queue. Its methods may be called from any thread."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self._clock = clock
        self._lock = threading.Lock()
        self.taken = 0  # number of places that are taken
        self._completed: deque[float] = deque(maxlen=32)  # moments of the last completions

    @property
    def is_full(self) -> bool:
        """Tells if no place is free."""
        return self.taken >= self.capacity

    def admit(self) -> "Permit":
        """Returns a permit that has no place yet. Raises QueueFull if no place is free."""
        if self.is_full:
            raise self._full()
        return Permit(self)

    def take(self, permit: "Permit", places: int) -> None:
        """Gives a permit ``places`` more places, all or none. Raises QueueFull if fewer are free."""
        with self._lock:
            if self.taken + places > self.capacity:
                raise self._full()
            self.taken += places
            permit.places += places

    def give_back(self, permit: "Permit", places: int) -> None:
        """Frees ``places`` places of a permit, or all that it still has if it has fewer."""
        with self._lock:
            places = min(places, permit.places)
            permit.places -= places
            self.taken -= places

    def completed(self) -> None:
        """Counts a finished request. Its moment sets the Retry-After of later refusals."""
        self._completed.append(self._clock())

    def _full(self) -> QueueFull:
        """Returns the refusal, with the seconds until a full queue is served at the recent rate: from 1 to 60, and
        1 if the rate is not known."""
        now, seconds = self._clock(), 1.0
        # The list is a copy because another thread may append meanwhile.
        moments = [moment for moment in list(self._completed) if now - moment <= _RECENT_S]
        if len(moments) > 1 and moments[-1] > moments[0]:
            rate = (len(moments) - 1) / (moments[-1] - moments[0])
            seconds = min(max(self.capacity / rate, 1.0), 60.0)
        return QueueFull(seconds)


class Permit:
    """Holds a request's places in the queue: one for each image that has arrived and has no row yet.

    A permit is a context manager: at its end all places that it still has are free again, however the request
    ended. `places` is the number that it has now."""

    __slots__ = ("_admission", "places")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.places = 0

    def take(self, images: int = 1) -> None:
        """Takes a place for each of ``images`` images that have arrived. Raises TooManyImages if the whole queue
        has fewer places, and QueueFull if fewer places are free; the permit keeps the places that it had."""
        if images > self._admission.capacity:
            raise TooManyImages(
                f"There are {images} images; send at most {self._admission.capacity} in one request, the size of "
                "this server's queue."
            )
        self._admission.take(self, images)

    def move(self, admission: Admission) -> None:
        """Takes later places from another queue, of the model that the request names. Any place that the permit has
        is of that queue already."""
        self._admission = admission

    def admitted(self) -> None:
        """Frees the place of one image, which has its row on the device now."""
        self._admission.give_back(self, 1)

    def release(self) -> None:
        """Frees all places of the request. A second call does nothing."""
        if self.places:
            self._admission.give_back(self, self.places)

    def __enter__(self) -> "Permit":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
