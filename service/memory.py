"""Divides the memory that a server may take between what requests make it hold, and counts request bodies.

The bound of all processes of a server together, in bytes, which no traffic takes it past (docs/security.md):

    start + documents + bodies + pixels + prompts + queue_size x row + max_connections x connection

`start` is what it takes when it is READY, with the buffers of all rows of its largest bucket; `documents` are
FastAPI and pydantic, 20 MiB, which the first request for the OpenAPI document imports; `prompts` is the process
that tokenizes them, with what a prompt may take there (`captioning/prompt_worker.py`); `row` is one picture of the
model's input size, 3 bytes a pixel; a connection holds a packet of 256 KiB, 64 KiB of a body and a head.
"""

import math
import os
import resource
import threading
from typing import TYPE_CHECKING

from snapcap.service.limits import BodyMemoryFull
from snapcap.warmup.machine.capacity import memory_limits
from snapcap.warmup.machine.denied import process_limit

if TYPE_CHECKING:
    from starlette.types import Scope

    from snapcap.service.config.settings import HttpLimits, Settings

# More makes nothing faster: 32 bodies of 20 MiB, and more pictures of 50 million pixels than CPUs decode at a time.
_MOST_BODIES = 1 << 30
_MOST_PIXELS = 4 << 30


def memory_limit() -> int:
    """Returns the bytes that the processes of this server may take together: the least of the machine's memory, the
    limits of the control groups, as `docker run --memory` and Kubernetes set them, and RLIMIT_AS."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    address_space, _ = process_limit(resource.RLIMIT_AS)
    limits = [machine, *(limit for limit, *_ in memory_limits())]
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    return min(limits)


def body_memory(limits: "HttpLimits") -> int:
    """Returns the bytes of memory that the bodies of all requests may take, on their way and until their images are
    decoded: the value of the option, or else a sixteenth of the server's memory."""
    return limits.max_body_memory or min(memory_limit() // 16, _MOST_BODIES)


def decode_memory(settings: "Settings") -> int:
    """Returns the bytes of memory that all images together may take while they are decoded: the value of the
    option, or else a quarter of the server's memory. The rest is the model's and the interpreters'."""
    return settings.images.decode_memory or min(memory_limit() // 4, _MOST_PIXELS)


_KEY = "body_account"


class BodyBudget:
    """Bytes of all bodies together, from any thread. Counted is what has been received, not what was announced: a
    client that sends nothing reserves nothing."""

    def __init__(self, limit: float = math.inf) -> None:
        """`limit`: in bytes. A request that is alone may exceed it, so that no limit can refuse a body that is
        within the limit of one."""
        self.limit = limit
        self._lock = threading.Lock()
        self.held = 0  # bytes that are held now

    def add(self, count: int, own: int) -> None:
        """`own`: what the asking request holds already. Raises BodyMemoryFull; then nothing is added."""
        with self._lock:
            if self.held + count > self.limit and self.held > own:
                raise BodyMemoryFull(int(self.limit))
            self.held += count

    def remove(self, count: int) -> None:
        with self._lock:
            self.held -= count


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
