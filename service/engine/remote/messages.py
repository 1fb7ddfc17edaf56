"""Defines the messages between the HTTP process and the engine process."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from snapcap.service.engine.request import Completion, Limits
from snapcap.service.errors import ServiceError
from snapcap.service.telemetry.work import Work
from snapcap.warmup.progress.status import CompilerCounts, StatusState
from snapcap.warmup.progress.timeline import Phase
from snapcap.warmup.runtime.slot_request import SamplingParams


class Submit(NamedTuple):
    """A request whose pixels are in a slot of the shared memory.

    ``number`` identifies the request in all messages. ``deadline`` is a moment of ``time.monotonic``, a clock that
    all processes of a machine share."""

    number: int
    request_id: str
    slot: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    deadline: float
    streams: bool
    text_ids: tuple[int, ...]
    ahead: int


class Cancel(NamedTuple):
    """The client of this request has left."""

    number: int


class Rehearsed(NamedTuple):
    """The rehearsal is over: the engine may serve requests."""


class Beat(NamedTuple):
    """The event loop of the HTTP process runs. Once the engine serves, its process answers with a `Pulse`."""


class Pulse(NamedTuple):
    """The progress of the device thread since the start.

    ``turns`` counts all its turns, those included that it makes because it is woken. ``work`` counts calls, and the
    turns that had work to do. ``doing`` is the operation that is running, if it can take long."""

    turns: int = 0
    work: int = 0
    doing: str = ""


class CheckpointFound(NamedTuple):
    """The checkpoint is in this folder."""

    folder: Path


class ArtifactsFound(NamedTuple):
    """The search for artifacts has ended. ``image_library``: content of the library that resizes pictures, if the
    artifacts have it."""

    image_library: bytes | None


class ModelLoaded(NamedTuple):
    """The model is warm, and waits for `Rehearsed`. ``rehearses``: a request with the model is rehearsed before
    READY."""

    limits: Limits
    rehearses: bool


class Usage(NamedTuple):
    """Bytes allocated on the device, and the counts of the compiler."""

    device_bytes: int = 0
    compiler: CompilerCounts = CompilerCounts()


class Ready(NamedTuple):
    """The engine serves requests from now on."""


class Failed(NamedTuple):
    """The start or the device has failed, so the model is not served. The engine process has logged the reason."""

    sentence: str


class Turn(NamedTuple):
    """The results of one or more turns of the engine: at most one message for a decode step, however many rows it
    has.

    ``admitted`` are the requests whose slots of shared pixels are free again. ``works`` has the rows, tokens and
    durations of each decode step and of its encodes. ``tokens`` are those of requests that stream. ``failed`` holds
    each failed request and the error for its client.
    """

    admitted: list[int]
    works: list[Work]
    tokens: list[tuple[int, int]]
    completed: list[tuple[int, Completion]]
    failed: list[tuple[int, ServiceError]]

    @classmethod
    def of(cls, failed: Iterable[tuple[int, ServiceError]] = ()) -> "Turn":
        """Returns a turn that has failed requests and nothing else."""
        return cls([], [], [], [], list(failed))


ToEngine: TypeAlias = Submit | Cancel | Rehearsed | Beat
# A `Phase` of the start has begun or ended; a `StatusState` is the new status of the start or of a build.
ToHttp: TypeAlias = (
    CheckpointFound | ArtifactsFound | ModelLoaded | Phase | StatusState | Usage | Ready | Failed | Turn | Pulse
)
Message: TypeAlias = ToEngine | ToHttp
