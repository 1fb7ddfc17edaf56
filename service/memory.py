"""Divides a server's memory between request bodies and images that are decoded, and counts request bodies.

No traffic makes all processes of a server together take more than (in bytes; docs/security.md has the numbers)

    start + documents + bodies + pixels + processes + prompts + queue_size x row + max_connections x connection

`start` is the memory at READY, with the buffers of all rows; `documents` are FastAPI and pydantic, which the first
request for the OpenAPI document imports; `processes` is memory that decode processes keep; `prompts` is the process
that tokenizes prompts, with its limit (`captioning/prompt_worker.py`); `row` is a picture of the model's input
size, 3 bytes a pixel; `connection` is a packet, a part of a body, heads, and buffers of the kernel.
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

# Larger defaults would not help: they hold 51 bodies of 20 MiB, and more large pictures than CPUs decode at a time.
_MOST_BODIES = 1 << 30
_MOST_PIXELS = 4 << 30


def memory_limit() -> int:
    """Returns the bytes that all processes of this server may take together: the least of the machine's memory, the
    limits of the control groups (which `docker run --memory` and Kubernetes set) and RLIMIT_AS."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    address_space, _ = process_limit(resource.RLIMIT_AS)
    limits = [machine, *(limit for limit, *_ in memory_limits())]
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    return min(limits)


def body_memory(limits: "HttpLimits") -> int:
    """Returns the bytes of memory that all request bodies may take until their images are decoded: the value of the
    option, or else a sixteenth of the server's memory."""
    return limits.max_body_memory or min(memory_limit() // 16, _MOST_BODIES)


def decode_memory(settings: "Settings") -> int:
    """Returns the bytes of memory that all images together may take while they are decoded: the value of the
    option, or else a quarter of the server's memory. The rest is for the model and the interpreters."""
    return settings.images.decode_memory or min(memory_limit() // 4, _MOST_PIXELS)


_KEY = "body_account"


class BodyBudget:
    """Bounds the bytes of all bodies together. Thread-safe. Only received bytes count, not the announced length, so
    a client that sends nothing reserves nothing."""

    def __init__(self, limit: float = math.inf) -> None:
        """`limit`: bytes. A lone request may exceed it, so no limit refuses a body of an allowed size."""
        self.limit = limit
        self._lock = threading.Lock()
        self.held = 0  # bytes that are held now

    def add(self, count: int, own: int) -> None:
        """Adds `count` bytes of a request that holds `own` bytes already. Raises BodyMemoryFull and adds nothing if
        there is no room."""
        with self._lock:
            if self.held + count > self.limit and self.held > own:
                raise BodyMemoryFull(int(self.limit))
            self.held += count

    def remove(self, count: int) -> None:
        with self._lock:
            self.held -= count


class BodyAccount:
    """Counts the bytes that one request holds until its reply is complete and each of its images is decoded, even
    if its client has left."""

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
    """Opens and returns the account of a request, before its body is read."""
    account = BodyAccount(budget)
    scope.setdefault("state", {})[_KEY] = account
    return account


def body_account(scope: "Scope") -> BodyAccount | None:
    """Returns the account of a request; None if its body has not been read."""
    account: BodyAccount | None = scope["state"].get(_KEY)
    return account
