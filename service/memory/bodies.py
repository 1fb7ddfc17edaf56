"""Counts the bytes that request bodies make the server hold, and refuses those above their share."""

import math
import threading
from typing import TYPE_CHECKING

from snapcap.service.limits import BodyMemoryFull

if TYPE_CHECKING:
    from starlette.types import Scope

_KEY = "body_account"


class BodyBudget:
    """Bytes of all bodies together, from any thread. Counted is what has been received, not what was announced: a
    client that sends nothing reserves nothing."""

    def __init__(self, limit: float = math.inf) -> None:
        """`limit`: in bytes. A request that is alone may exceed it, so that no limit can refuse a body that is
        within the limit of one."""
        self.limit = limit
        self._lock = threading.Lock()
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return self._held

    def add(self, count: int, own: int) -> None:
        """`own`: what the asking request holds already. Raises BodyMemoryFull; then nothing is added."""
        with self._lock:
            if self._held + count > self.limit and self._held > own:
                raise BodyMemoryFull(int(self.limit))
            self._held += count

    def remove(self, count: int) -> None:
        with self._lock:
            self._held -= count


class BodyAccount:
    """Counts the bytes that one request holds until its reply is complete and each of its images is decoded. Images
    of a client that has left count until then too."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._holders = 1
        self._bytes = 0

    def take(self, count: int) -> None:
        """Adds bytes. Raises BodyMemoryFull if there is no room; the caller must not keep them then."""
        self._budget.add(count, self._bytes)
        self._bytes += count

    def give_back(self, count: int) -> None:
        """Removes bytes."""
        self._bytes -= count
        self._budget.remove(count)

    def hold(self) -> "BodyAccount":
        """Adds a holder: the bytes are given back when every holder has called `release`."""
        with self._lock:
            self._holders += 1
        return self

    def release(self) -> None:
        """Removes a holder, and gives all bytes back after the last one."""
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self.give_back(self._bytes)


def open_account(scope: "Scope", budget: BodyBudget) -> BodyAccount:
    """The account of a request whose body is about to be read."""
    account = BodyAccount(budget)
    scope.setdefault("state", {})[_KEY] = account
    return account


def body_account(scope: "Scope") -> BodyAccount | None:
    """The account of a request; None when its body has not been read."""
    account: BodyAccount | None = scope["state"].get(_KEY)
    return account
