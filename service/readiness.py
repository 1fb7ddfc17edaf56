"""Keeps the life of the process as one thread-safe state machine, and puts work off until it is READY.

STARTING ──► READY ──► DRAINING
    │          │          ▲
    │          ▼          │
    └──────► FAILED ──────┘          STARTING ──► DRAINING when a signal arrives during the start
"""

import threading
from collections.abc import Callable
from enum import StrEnum

# The first request would be held up by what begins beside it: imports, processes, work between two steps.
AFTER_READY_S = 0.5


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


_MOVES: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.READY, State.FAILED, State.DRAINING}),
    State.READY: frozenset({State.FAILED, State.DRAINING}),
    State.FAILED: frozenset({State.DRAINING}),
    State.DRAINING: frozenset(),
}


class IllegalTransitionError(RuntimeError):
    """A move that the diagram does not have."""


class Readiness:
    """What /readyz answers. `current_phase` names the start phase that is running ("import_torch", …)."""

    def __init__(self, current_phase: Callable[[], str]) -> None:
        self._current_phase = current_phase
        self._lock = threading.Lock()
        self._state = State.STARTING
        self._error: str | None = None

    @property
    def state(self) -> State:
        return self._state

    @property
    def servable(self) -> bool:
        """Whether /readyz answers 200."""
        return self._state is State.READY

    @property
    def error(self) -> str | None:
        """The sentence given to `fail`, else None."""
        return self._error

    def phase(self) -> str:
        """The running start phase while STARTING, else the name of the state."""
        return self._current_phase() if self._state is State.STARTING else self._state.value

    def ready(self) -> bool:
        """STARTING to READY. False, and no move, when a drain has begun meanwhile: the start thread can lose
        that race. Raises IllegalTransitionError from READY or FAILED."""
        return self._move(State.READY)

    def fail(self, error: str) -> bool:
        """To FAILED with a sentence for /readyz and /startup; False when draining.

        Raises IllegalTransitionError when it has failed before."""
        return self._move(State.FAILED, error)

    def drain(self) -> bool:
        """To DRAINING from anywhere; False when it was draining already."""
        return self._move(State.DRAINING)

    def _move(self, to: State, error: str | None = None) -> bool:
        with self._lock:
            if self._state is State.DRAINING:
                return False
            if to not in _MOVES[self._state]:
                raise IllegalTransitionError(f"cannot go from {self._state} to {to}")
            if error is not None:
                self._error = error
            self._state = to
            return True


def after_ready(work: Callable[[], object], seconds: float = AFTER_READY_S) -> threading.Timer:
    """Do it so many seconds from now, on a thread of its own; cancel the result to leave it undone."""
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()
    return timer
