"""Queues requests in front of the slots, some for larger batches that are not ready yet. Pure Python, no torch."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import chain
from operator import attrgetter

from snapcap.models.dataclass import dataclass
from snapcap.service.engine.request import CaptionRequest


@dataclass(frozen=True)
class Waiting:
    """A request, and since when it waits, on the scheduler's clock."""

    request: CaptionRequest
    submitted: float

    @property
    def slots(self) -> int:
        """That it needs at once."""
        return self.request.params.num_beams


class Line:
    """First come first served. Not thread-safe: the scheduler holds its lock.

    One that needs more slots than any batch that is ready has rows stands aside: those behind it pass, as it can
    only wait. Once such a batch is ready, it has its old place again, and from then on nobody passes it."""

    def __init__(self, rows: int, cold: Iterable[int] = ()) -> None:
        """``rows``: of the largest batch that is ready. ``cold``: of those that are to become ready."""
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
        """How many need no more slots than there are."""
        return len(self._next)

    @property
    def most(self) -> int:
        """Slots that a request may have at most, by now or later."""
        return max((self._rows, *self._cold))

    def append(self, entry: Waiting) -> None:
        (self._next if entry.slots <= self._rows else self._aside).append(entry)

    def warmed(self, rows: int) -> None:
        """A batch of so many rows is ready."""
        self._cold.discard(rows)
        self._rows = max(rows, self._rows)
        back = [entry for entry in self._aside if entry.slots <= self._rows]
        self._aside = deque(entry for entry in self._aside if entry.slots > self._rows)
        self._next = deque(merge(back, self._next, key=attrgetter("submitted")))

    def give_up(self, rows: int) -> list[Waiting]:
        """A batch of so many rows will never be ready. Those that need it leave the line."""
        self._cold.discard(rows)
        lost = [entry for entry in self._aside if entry.slots > self.most]
        self._aside = deque(entry for entry in self._aside if entry.slots <= self.most)
        return lost

    def fitting(self, free: int) -> int:
        """How many of the first have room together in so many slots."""
        count = 0
        for entry in self._next:
            free -= entry.slots
            if free < 0:
                break
            count += 1
        return count

    def take(self, count: int) -> list[Waiting]:
        """The first of them, who leave the line."""
        return [self._next.popleft() for _ in range(count)]

    def keep(self, wanted: Callable[[Waiting], bool]) -> None:
        """The others leave the line."""
        self._next = deque(entry for entry in self._next if wanted(entry))
        self._aside = deque(entry for entry in self._aside if wanted(entry))
