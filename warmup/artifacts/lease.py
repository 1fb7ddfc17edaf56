"""Leases the build of a key to one builder at a time.

A lease saves work and nothing else: two builders make the same set, and one publishes it.

A builder that holds the lease renews it; one that was killed does not, and after the lease has expired another one
takes it over. Times are compared on another machine's clock than they were written by, so a lease counts as expired
only when it is ``CLOCK_SKEW`` seconds past its time; clocks that are further apart cost a second build, no more.
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
_LONGEST = 3600.0  # seconds that a lease is believed: anybody who can write to the store could hold up all others
_OWNER_CHARACTERS = 200
_FAR = 1e15

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """Somebody else is building.

    remaining: seconds until the lease may be taken over if it is not renewed; 0 when it is worth asking at once.
    """

    owner: str
    remaining: float


@dataclass
class Lease:
    """A lease that is ours. Not ``exclusive``: the store cannot keep others from building too.

    ttl: seconds until it expires unless renewed.
    """

    store: ArtifactStore
    key: str
    owner: str
    ttl: float
    exclusive: bool
    clock: Callable[[], float]
    _version: str | None = None

    def renew(self) -> bool:
        """Put the expiry off; False when the lease is lost to somebody else. Raises StoreError if the store failed;
        the lease may still be ours."""
        if not self.exclusive:
            return True
        version = None
        if self._version is not None:
            version = self.store.write(lease_name(self.key), self._content(), if_version=self._version)
        self._version = version or self._version_of_ours()
        return self._version is not None

    def release(self) -> None:
        """Give the lease back, if it is ours; a store that fails keeps it until it expires."""
        with contextlib.suppress(StoreError):
            if self.exclusive and self.renew():
                self.store.delete(lease_name(self.key))
        self._version = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Renew on a daemon thread as long as the block runs, then release."""
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
                    _log.warning("the lease on %s was taken over; building goes on, twice", self.key[:12])
                    return
            except StoreError as error:
                _log.warning("the lease on %s was not renewed: %s", self.key[:12], error)

    def _content(self) -> bytes:
        expires = self.clock() + self.ttl
        return canonical_json({"owner": self.owner, "expires": expires, "ttl": self.ttl, "version": _VERSION})

    def _version_of_ours(self) -> str | None:
        """After a refusal: a retry is refused too when the first try had arrived and only its answer was lost."""
        stored = self.store.read(lease_name(self.key), _LIMIT)
        if stored is None or _parse(stored.data).get("owner") != self.owner:
            return None
        return stored.version

    def _take(self, expired: str | None) -> bool:
        """Write the lease over the expired one of that version, or where there is none."""
        name, content = lease_name(self.key), self._content()
        version = self.store.write(name, content, if_absent=expired is None, if_version=expired)
        self._version = version or self._version_of_ours()
        return self._version is not None


def acquire(
    store: ArtifactStore, key: str, ttl: float, owner: str = "", clock: Callable[[], float] = time.time
) -> Lease | Held:
    """Take the lease on building a key, from nobody or from somebody whose lease has expired.

    Args:
        ttl: seconds; a build that is killed holds others up for as long.
        owner: unique; made from host, process and chance if empty.
        clock: seconds since the epoch.

    Raises:
        StoreDeniedError: the store cannot be written to.
        StoreError: it cannot be reached.
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
    # Somebody was faster; and has finished, if that lease is gone already: asking again finds the artifacts.
    stored = store.read(lease_name(key), _LIMIT)
    return Held("", 0.0) if stored is None else _held(stored.data, clock())


def _held(data: bytes, now: float) -> Held:
    """A lease that cannot be read has expired, and so has one of a clock that is far ahead."""
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
