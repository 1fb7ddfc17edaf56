"""Shares device memory among the workers of a build: a piece of work begins when it fits beside those that run."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Room:
    """Bytes of device memory for pieces of work. Thread-safe.

    A piece that needs more than there is runs alone: the need is an estimate, and the card may have more.
    """

    def __init__(self, size: int | None) -> None:
        """``size``: bytes in all; None: memory is no limit."""
        self._size = size
        self._used = 0
        self._running = 0
        self.changed = threading.Condition()

    def _fits(self, need: int) -> bool:
        """With the condition held."""
        return self._size is None or self._running == 0 or self._used + need <= self._size

    def try_to_enter(self, need: int) -> bool:
        """Reserve ``need`` bytes where they are free. With the condition held."""
        if not self._fits(need):
            return False
        self._used += need
        self._running += 1
        return True

    def leave(self, need: int) -> None:
        """Give back what a piece of work had reserved."""
        with self.changed:
            self._used -= need
            self._running -= 1
            self.changed.notify_all()


class WorkQueue(Generic[T]):
    """Pieces of work that wait for room. The first one that fits is taken, so that small ones fill gaps."""

    def __init__(self, room: Room, need: Callable[[T], int]) -> None:
        self._room = room
        self._need = need
        self._waiting: list[T] = []
        self._closed = False

    def put(self, piece: T) -> None:
        with self._room.changed:
            self._waiting.append(piece)
            self._room.changed.notify_all()

    def close(self) -> None:
        """Say that nothing more will come: whoever waits for a piece ends when none is left."""
        with self._room.changed:
            self._closed = True
            self._room.changed.notify_all()

    def abandon(self) -> None:
        """Drop all pieces, and end whoever waits for one."""
        with self._room.changed:
            self._waiting.clear()
        self.close()

    @contextmanager
    def taken(self) -> Iterator[T | None]:
        """Wait for a piece that fits and hold its memory inside the block; None when nothing is left."""
        piece = self._wait()
        try:
            yield piece
        finally:
            if piece is not None:
                self._room.leave(self._need(piece))

    def _wait(self) -> T | None:
        with self._room.changed:
            while True:
                for place, piece in enumerate(self._waiting):
                    if self._room.try_to_enter(self._need(piece)):
                        return self._waiting.pop(place)
                if self._closed and not self._waiting:
                    return None
                self._room.changed.wait()
