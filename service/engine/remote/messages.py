"""Defines the messages between the HTTP process and the engine process."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from snapcap.service.engine.limits import Limits
from snapcap.service.engine.request import Completion
from snapcap.service.errors import ServiceError
from snapcap.warmup.progress.compile_events import CompilerCounts
from snapcap.warmup.progress.status import StatusState
from snapcap.warmup.progress.timeline import Phase
from snapcap.warmup.runtime.slot_request import SamplingParams


class Submit(NamedTuple):
    """A request whose pixels are in a slot of the shared memory. ``number`` is its name in all messages,
    ``deadline`` a moment of ``time.monotonic``, which all processes of a machine share."""

    number: int
    request_id: str
    slot: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    deadline: float
    streams: bool
    text_ids: tuple[int, ...]


class Cancel(NamedTuple):
    """Nobody waits for this request any more."""

    number: int


class Rehearsed(NamedTuple):
    """The HTTP process is warm: the engine may serve."""


class Beat(NamedTuple):
    """The event loop runs. Is answered with a pulse, once the engine serves."""


class Pulse(NamedTuple):
    """What the device thread has come to since the start: ``turns``, which it makes when it is woken as well, and
    ``work``, those in which it did something. ``doing``: what it was called for that may take long, if that."""

    turns: int = 0
    work: int = 0
    doing: str = ""


class CheckpointFound(NamedTuple):
    """The checkpoint is in this folder."""

    folder: Path


class ModelLoaded(NamedTuple):
    """The model is warm, and waits for the rehearsal."""

    limits: Limits


class PhaseSeen(NamedTuple):
    """A phase of the start has begun or ended."""

    phase: Phase


class StatusSeen(NamedTuple):
    """The status of the start or of a build is now this."""

    state: StatusState


class Usage(NamedTuple):
    """Bytes allocated on the device, and what was compiled."""

    device_bytes: int = 0
    compiler: CompilerCounts = CompilerCounts()


class Ready(NamedTuple):
    """From now on requests are served."""


class Failed(NamedTuple):
    """The model cannot be served, or no longer. It is in the log already."""

    sentence: str


class Turn(NamedTuple):
    """What turns of the engine have come to: at most one message for a decode step, however many rows it has.

    ``admitted``: requests whose slots are free again. ``waited``: seconds of each that was admitted.
    ``encoded`` and ``stepped``: bucket, rows and seconds. ``tokens``: of requests that stream. ``failed``: with
    what the client is told.
    """

    admitted: list[int]
    waited: list[float]
    encoded: list[tuple[int, int, float]]
    stepped: list[tuple[int, int, float]]
    generated: int
    tokens: list[tuple[int, int]]
    completed: list[tuple[int, Completion]]
    failed: list[tuple[int, ServiceError]]

    @classmethod
    def of(cls, failed: Iterable[tuple[int, ServiceError]] = ()) -> "Turn":
        """One that says no more than that."""
        return cls([], [], [], [], 0, [], [], list(failed))


ToEngine: TypeAlias = Submit | Cancel | Rehearsed | Beat
ToHttp: TypeAlias = CheckpointFound | ModelLoaded | PhaseSeen | StatusSeen | Usage | Ready | Failed | Turn | Pulse
Message: TypeAlias = ToEngine | ToHttp
