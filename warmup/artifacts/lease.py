"""Leases the build of a key to one builder at a time.

A lease only saves work: without it, two builders make the same set, and one publishes it.

A builder renews its lease while it builds. If the builder is killed, the lease expires, and another builder takes
it over. Machines' clocks differ, so a lease counts as expired only ``CLOCK_SKEW`` seconds after its time. If clocks
differ more, the set is built twice.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard
from uuid import uuid4

from snapcap.models.dataclass import dataclass
from snapcap.models.json_object import load_object
from snapcap.warmup.artifacts.key import canonical_json
from snapcap.warmup.artifacts.store import ArtifactStore, StoreError, lease_name

CLOCK_SKEW = 10.0
_LIMIT = 4096  # bytes of a lease
_VERSION = 1
_LONGEST = 3600.0  # most seconds of a lease: otherwise a writer of the store could block all builders for good
_OWNER_CHARACTERS = 200
_FAR = 1e15

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """Says that another builder holds the lease.

    remaining: seconds until the lease may be taken over unless it is renewed; 0: ask again at once."""

    owner: str
    remaining: float


@dataclass
class Lease:
    """Holds a lease of this process. ``exclusive`` is False if the store cannot exclude other builders.

    ttl: seconds until the lease expires unless renewed."""

    store: ArtifactStore
    key: str
    owner: str
    ttl: float
    exclusive: bool
    clock: Callable[[], float]
    _version: str | None = None

    def renew(self) -> bool:
        """Extend the lease. Returns False if another builder has it. Raises StoreError if the store fails;
        then this process may still hold it."""
        if not self.exclusive:
            return True
        version = None
        if self._version is not None:
            version = self.store.write(lease_name(self.key), self._content(), if_version=self._version)
        self._version = version or self._version_of_ours()
        return self._version is not None

    def release(self) -> None:
        """Remove the lease if this process holds it. If the store fails, the lease stays until it expires."""
        with contextlib.suppress(StoreError):
            if self.exclusive and self.renew():
                self.store.delete(lease_name(self.key))
        self._version = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Renews the lease on a daemon thread while the block runs, then releases it."""
        stop = threading.Event()
        thread = threading.Thread(target=self._keep, args=(stop,), name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.release()

    def _keep(self, stop: threading.Event) -> None:
        while not stop.wait(self.ttl / 3):
            try:
                if not self.renew():
                    _log.warning("another builder took the lease on %s over; both builds continue", self.key[:12])
                    return
            except StoreError as error:
                _log.warning("the lease on %s was not renewed: %s", self.key[:12], error)

    def _content(self) -> bytes:
        expires = self.clock() + self.ttl
        return canonical_json({"owner": self.owner, "expires": expires, "ttl": self.ttl, "version": _VERSION})

    def _version_of_ours(self) -> str | None:
        """Returns the version of the stored lease if this process wrote it, else None. A refused write may be the
        retry of a write that succeeded, but whose answer was lost."""
        stored = self.store.read(lease_name(self.key), _LIMIT)
        if stored is None or _parse(stored.data).get("owner") != self.owner:
            return None
        return stored.version

    def _take(self, expired: str | None) -> bool:
        """Writes the lease. ``expired``: the version of the expired lease to replace; None: there is no lease."""
        name, content = lease_name(self.key), self._content()
        version = self.store.write(name, content, if_absent=expired is None, if_version=expired)
        self._version = version or self._version_of_ours()
        return self._version is not None


def acquire(
    store: ArtifactStore, key: str, ttl: float, owner: str = "", clock: Callable[[], float] = time.time
) -> Lease | Held:
    """Takes the lease for building a key if there is none or if it has expired, else returns ``Held``. Raises
    StoreDeniedError if the store cannot be written to, and StoreError if the store cannot be reached.

    Args:
        ttl: seconds until the lease expires; a killed build blocks other builders this long.
        owner: unique name of the builder; if empty, made from host, process id and random digits.
        clock: returns seconds since the epoch.
    """
    owner = owner or f"{socket.gethostname()}/{os.getpid()}/{uuid4().hex[:8]}"
    lease = Lease(store, key, owner, ttl, store.is_conditional(), clock)
    if not lease.exclusive:
        return lease
    stored = store.read(lease_name(key), _LIMIT)
    if stored is not None:
        holder = _held(stored.data, clock())
        if holder.remaining > 0:
            return holder
    if lease._take(None if stored is None else stored.version):
        return lease
    # Another builder was faster. If its lease is gone already, it has finished, and a new lookup finds the
    # artifacts.
    stored = store.read(lease_name(key), _LIMIT)
    return Held("", 0.0) if stored is None else _held(stored.data, clock())


def _held(data: bytes, now: float) -> Held:
    """Parses a lease. An unreadable lease, or one that expires too far in the future, counts as expired."""
    content = _parse(data)
    owner, expires, ttl = content.get("owner"), content.get("expires"), content.get("ttl")
    if not isinstance(owner, str) or not _is_number(expires) or not _is_number(ttl):
        return Held("", 0.0)
    remaining = expires + CLOCK_SKEW - now
    longest = min(ttl, _LONGEST) + 2 * CLOCK_SKEW
    return Held(owner[:_OWNER_CHARACTERS], remaining if 0 < remaining <= longest else 0.0)


def _is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value is a number of bounded size. JSON's integers may have thousands of digits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_FAR < value < _FAR


def _parse(data: bytes) -> dict[str, Any]:
    try:
        return load_object(data)
    except ValueError:
        return {}
