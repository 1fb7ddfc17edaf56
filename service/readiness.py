"""Keeps the state of the process in a thread-safe state machine, and puts work off until after READY.

STARTING ──► READY ──► DRAINING
    │          │          ▲
    │          ▼          │
    └──────► FAILED ──────┘          STARTING ──► DRAINING when a signal arrives during the start
"""

import threading
from collections.abc import Callable
from enum import IntEnum, StrEnum
from functools import partial

# Seconds after READY until background work begins: imports, new processes and calls between two steps would slow
# the first request down.
AFTER_READY_S = 0.5
_PROBES = frozenset({"/livez", "/readyz", "/health", "/v2/health/live", "/v2/health/ready"})


def is_probe(path: str) -> bool:
    """Tells whether a path is for probes of orchestrators, which may use any name of the server and send no key."""
    return path in _PROBES or (path.startswith("/v2/models/") and path.endswith("/ready"))


class State(StrEnum):
    """The states in their order: the process moves forward only, and may leave states out."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"


_ORDER = tuple(State)


class ExitStatus(IntEnum):
    """The exit statuses of the commands, beside 0, 12 of a stuck event loop, and those of signals."""

    FAILED = 1  # an image, a build or the lookup of artifacts failed, or the address is taken
    BAD_OPTION = 2  # the command line, a variable or a file that it names
    START_FAILED = 3  # the model, the artifacts of a strict start, or the device
    ENGINE_LOST = 4  # after the start: the engine, its device, or the decode processes

    @classmethod
    def of(cls, error: Exception) -> "ExitStatus":
        """Returns the status of a command that an error ends before a start: the model cannot be read, or another
        failure."""
        from snapcap.models.errors import WeightsError  # noqa: PLC0415  only failures need it
        from snapcap.models.fields import ConfigError  # noqa: PLC0415
        from snapcap.warmup.checkpoints.local import CheckpointError  # noqa: PLC0415

        is_of_model = isinstance(error, CheckpointError | ConfigError | WeightsError)
        return cls.START_FAILED if is_of_model else cls.FAILED


class Readiness:
    """Holds the state that /readyz answers. `current_phase` returns the name of the running start phase, such as
    "import_torch"."""

    def __init__(self, current_phase: Callable[[], str]) -> None:
        self._current_phase = current_phase
        self._lock = threading.Lock()
        self.state = State.STARTING
        self.error: str | None = None  # the sentence given to `fail`
        self.exit_status = 0  # 0, or an `ExitStatus` after `fail`

    @property
    def servable(self) -> bool:
        """Tells if /readyz answers 200."""
        return self.state is State.READY

    def phase(self) -> str:
        """Returns the name of the running start phase while STARTING, and later the name of the state."""
        return self._current_phase() if self.state is State.STARTING else self.state.value

    def ready(self) -> bool:
        """Moves from STARTING to READY. Returns False, without a move, from any other state: a signal may arrive
        while the start ends."""
        return self._move(State.READY)

    def fail(self, error: str) -> bool:
        """Moves to FAILED, with a sentence for /readyz and /startup. Returns False, without a move, if the server
        drains or has failed before."""
        return self._move(State.FAILED, error)

    def drain(self) -> bool:
        """Moves from any state to DRAINING. Returns False if the state was DRAINING already."""
        return self._move(State.DRAINING)

    def _move(self, to: State, error: str | None = None) -> bool:
        with self._lock:
            if _ORDER.index(to) <= _ORDER.index(self.state):
                return False
            if error is not None:
                self.error = error
                started = self.state is not State.STARTING
                self.exit_status = ExitStatus.ENGINE_LOST if started else ExitStatus.START_FAILED
            self.state = to
            return True


def after_ready(work: Callable[[], object]) -> threading.Timer:
    """Runs `work` in `AFTER_READY_S` seconds on a thread of its own. Cancelling the timer drops the work."""
    timer = threading.Timer(AFTER_READY_S, work)
    timer.daemon = True
    timer.start()
    return timer


class BackgroundWork:
    """Runs `work` on a thread of its own soon after READY, and can end it. `work` gets this object."""

    def __init__(self, work: Callable[["BackgroundWork"], object]) -> None:
        self.ended = threading.Event()
        self._stops: list[Callable[[], object]] = []
        self._timer = after_ready(partial(work, self))

    def keep(self, stop: Callable[[], object]) -> bool:
        """Adds a function that ends a part of the work. Returns False if the work was ended already."""
        self._stops.append(stop)
        return not self.ended.is_set()

    def end(self, patience: float = 0.0) -> None:
        """Ends the work, or drops it if it has not begun. Waits up to `patience` seconds for its thread."""
        self.ended.set()
        self._timer.cancel()
        for stop in self._stops:
            stop()
        self._timer.join(patience)
