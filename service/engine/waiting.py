"""Queues requests in front of the slots, some for larger buckets that are not ready yet. Imports no torch."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import chain
from operator import attrgetter

from snapcap.models.dataclass import dataclass
from snapcap.service.engine.request import CaptionRequest


@dataclass(frozen=True)
class Waiting:
    """A waiting request. `submitted` is the moment it was queued, on the scheduler's clock."""

    request: CaptionRequest
    submitted: float

    @property
    def slots(self) -> int:
        """Number of slots the request needs at the same time."""
        return self.request.params.num_beams


class Line:
    """Queues requests first come first served. Not thread-safe: the scheduler calls it under its lock.

    A request with more beams than the largest ready bucket has rows is set aside, and later requests overtake it,
    because it cannot run yet. Once a bucket that fits it is ready, the request has its old place in the queue again
    and is not overtaken any more."""

    def __init__(self, rows: int, cold: Iterable[int] = ()) -> None:
        """``rows`` is the size of the largest bucket that is ready, ``cold`` the sizes that are not ready yet."""
        self._rows = rows
        self._cold = set(cold)
        self._next: deque[Waiting] = deque()
        self._aside: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._next) + len(self._aside)

    def __iter__(self) -> Iterator[Waiting]:
        return chain(self._next, self._aside)

    @property
    def servable(self) -> int:
        """Number of waiting requests that a ready bucket fits."""
        return len(self._next)

    @property
    def most(self) -> int:
        """Greatest number of slots that a request may have, now or once the cold buckets are ready."""
        return max((self._rows, *self._cold))

    def append(self, entry: Waiting) -> None:
        (self._next if entry.slots <= self._rows else self._aside).append(entry)

    def warmed(self, rows: int) -> None:
        """Makes the bucket of ``rows`` rows ready, and queues the requests that were set aside for it."""
        self._cold.discard(rows)
        self._rows = max(rows, self._rows)
        back = [entry for entry in self._aside if entry.slots <= self._rows]
        self._aside = deque(entry for entry in self._aside if entry.slots > self._rows)
        self._next = deque(merge(back, self._next, key=attrgetter("submitted")))

    def give_up(self, rows: int) -> list[Waiting]:
        """Drops the bucket of ``rows`` rows, which will never be ready. Removes the requests that only it fits, and
        returns them."""
        self._cold.discard(rows)
        lost = [entry for entry in self._aside if entry.slots > self.most]
        self._aside = deque(entry for entry in self._aside if entry.slots <= self.most)
        return lost

    def fitting(self, free: int) -> int:
        """Number of requests, from the head of the queue, that fit together into ``free`` slots."""
        count = 0
        for entry in self._next:
            free -= entry.slots
            if free < 0:
                break
            count += 1
        return count

    def take(self, count: int) -> list[Waiting]:
        """Removes the first ``count`` requests from the queue and returns them."""
        return [self._next.popleft() for _ in range(count)]

    def keep(self, wanted: Callable[[Waiting], bool]) -> None:
        """Removes the requests that are not ``wanted``, including those that were set aside."""
        self._next = deque(entry for entry in self._next if wanted(entry))
        self._aside = deque(entry for entry in self._aside if wanted(entry))
