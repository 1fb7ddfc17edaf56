"""Watches the connections of the server: how many there are, and how long each waits for its client."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from snapcap.models.dataclass import dataclass
from snapcap.service.edge.refusal_log import RefusalLog

# Between two looks at all of them, in seconds.
_INTERVAL = 1.0
# A connection that has waited less may have sent what this process has not read yet: it is not closed for another.
_YOUNG = 1.0
# What a client still sends of a request that has its reply is dropped for so long: were the connection closed at
# once, the reply could be lost on its way.
_LINGER = 10.0
# Beyond the limit there is room for so many more, for probes only.
SPARE = 64
_UNREAD = 3.0  # seconds that an exit, or whoever needs the place, waits for a client that does not read


@dataclass(frozen=True)
class ConnectionLimits:
    """Times are in seconds. `head_bytes`: of a head with its trailers; `headers`: fields of it; `head_timeout`:
    from its first byte to its last; `idle_timeout`: without a byte; `send_timeout`: with a reply not read."""

    connections: int = 1024
    head_bytes: int = 32 << 10
    headers: int = 100
    head_timeout: float = 10.0
    idle_timeout: float = 75.0
    send_timeout: float = 30.0


class Watched(Protocol):
    """A connection, as the watch sees it."""

    unsent_since: float | None

    def unsent(self) -> int:
        """Bytes of replies that the client's side has not taken."""

    def close_idle(self) -> None:
        """Close it: nothing is lost."""

    def no_room(self) -> None:
        """Say so, and close it."""

    def head_late(self) -> None:
        """Say so, and close it."""

    def rest_late(self) -> None:
        """Close it: it has its reply."""

    def abort(self) -> None:
        """Close it, whatever is lost."""

    def give_up(self) -> None:
        """The server ends: refuse what has not begun to be answered, and close it."""


class Connections:
    """Belongs to one event loop. `count` is called with one of `telemetry.reasons.CLOSED` for each connection that
    is refused or closed for what its client does.

    In the tables are those that wait, in the order in which they began to: for a head, for the rest of a head, and
    for the end of a request that has its reply."""

    def __init__(
        self,
        limits: ConnectionLimits,
        count: Callable[[str], object] = lambda _: None,
        origins: frozenset[str] = frozenset(),
    ) -> None:
        """`origins`: whose pages may read, from a browser, why they are refused."""
        self.limits = limits
        self.origins = origins
        self.refusals = RefusalLog()
        self.count = count
        self.all: set[Watched] = set()
        self._leaving: set[Watched] = set()  # of them, those whose places others have
        self.idle: dict[Watched, float] = {}
        self.heads: dict[Watched, float] = {}
        self.rests: dict[Watched, float] = {}
        self._spare: dict[Watched, None] = {}  # beyond the limit, the oldest first
        self._send_timeout = limits.send_timeout
        self._timer: asyncio.TimerHandle | None = None

    @property
    def crowded(self) -> bool:
        """Whether there are more than there may be, for what does not only probe."""
        return self._count() > self.limits.connections

    def admit(self, connection: Watched, now: float) -> bool:
        """One more. Whether it may ask for anything, and not only probe.

        Raises ConnectionRefusedError when there is no room at all."""
        room = self._count() < self.limits.connections or self._make_room(now)
        if not room and self._count() >= self.limits.connections + SPARE:
            self.count("max_connections")
            self._make_spare_room()
        self.all.add(connection)
        self.idle[connection] = now
        if not room:
            self._spare[connection] = None
        return room

    def forget(self, connection: Watched) -> None:
        """It is closed."""
        self.all.discard(connection)
        self._leaving.discard(connection)
        self._wait_no_more(connection)

    def start(self) -> None:
        """Begin to look at them, on the running event loop."""
        loop = asyncio.get_running_loop()
        self._look(loop, loop.time() + _INTERVAL)

    def stop(self) -> None:
        """Look at them no more."""
        if self._timer is not None:
            self._timer.cancel()

    def exit(self) -> None:
        """The server is about to end, and does not wait long for clients that do not read."""
        self._send_timeout = min(self._send_timeout, _UNREAD)

    def give_up(self) -> None:
        """The server ends now."""
        for connection in list(self.all):
            self.count("grace_period")
            connection.give_up()

    def _look(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        # After the loop stood still nobody is late: what they have sent has not been read yet.
        if now - due < _INTERVAL:
            self._expire(now)
        self._timer = loop.call_later(_INTERVAL, self._look, loop, now + _INTERVAL)

    def _expire(self, now: float) -> None:
        for connection in _older(self.heads, now - self.limits.head_timeout):
            connection.head_late()
        for connection in _older(self.idle, now - self.limits.idle_timeout):
            connection.close_idle()
        for connection in _older(self.rests, now - _LINGER):
            connection.rest_late()
        for connection in list(self.all):
            if not connection.unsent():
                connection.unsent_since = None
            elif connection.unsent_since is None:
                connection.unsent_since = now
            elif now - connection.unsent_since >= (_UNREAD if connection in self._leaving else self._send_timeout):
                self.count("send_timeout")
                connection.abort()

    def _make_room(self, now: float) -> bool:
        """Close the one that waits the longest for its client, if any has for long enough."""
        first = [next(iter(table.items())) for table in (self.idle, self.heads, self.rests) if table]
        if not first:
            return False
        connection, since = min(first, key=lambda each: each[1])
        if now - since < _YOUNG:
            return False
        self.count("made_room")
        self._let_go(connection)
        connection.close_idle()
        return True

    def _make_spare_room(self) -> None:
        """Close the oldest beyond the limit that waits for its client, however short: a probe sends its request at
        once, and reads its reply. Raises ConnectionRefusedError."""
        for connection in self._spare:
            if connection in self.idle or connection in self.heads:
                self._let_go(connection)
                connection.no_room()
                return
        for connection in self._spare:
            if connection in self.rests or connection.unsent():
                self._let_go(connection)
                connection.abort()
                return
        raise ConnectionRefusedError

    def _let_go(self, connection: Watched) -> None:
        """It is about to be closed: another may have its place. Until it is, it is watched."""
        self._leaving.add(connection)
        self._wait_no_more(connection)

    def _wait_no_more(self, connection: Watched) -> None:
        self._spare.pop(connection, None)
        for table in (self.idle, self.heads, self.rests):
            table.pop(connection, None)

    def _count(self) -> int:
        return len(self.all) - len(self._leaving)


def _older(table: dict[Watched, float], than: float) -> list[Watched]:
    """Those that wait since then or longer."""
    found = []
    for connection, since in table.items():
        if since > than:
            break
        found.append(connection)
    return found
