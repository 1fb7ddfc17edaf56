"""What the HTTP process and the engine process say to each other, and how it is put into bytes.

Pickles, as both ends are one program, and nobody else can reach the pair of sockets between them.
"""

import pickle
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from snapcap.service.errors import ServiceError
from snapcap.service.limits import Limits
from snapcap.service.request import Completion, SamplingParams
from snapcap.warmup.progress.compile_events import CompilerCounts
from snapcap.warmup.progress.status import StatusState
from snapcap.warmup.progress.timeline import Phase

_LENGTH = struct.Struct("=I")
# What either end asks the socket for at once: more than a turn's message. For twice as much the allocator would go
# to the system each time, which costs five times as much as to receive a message.
RECEIVE_BYTES = 1 << 16


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


class Found(NamedTuple):
    """The checkpoint is in this folder."""

    folder: Path


class Loaded(NamedTuple):
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
ToHttp: TypeAlias = Found | Loaded | PhaseSeen | StatusSeen | Usage | Ready | Failed | Turn | Pulse
Message: TypeAlias = ToEngine | ToHttp
M = TypeVar("M")


def pack(message: object) -> bytes:
    """A message behind its length."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def receive(end: socket.socket) -> bytes | None:
    """What has come, without waiting: None for nothing yet, and no bytes once the other end is closed."""
    try:
        return end.recv(RECEIVE_BYTES)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""


class Unpacker(Generic[M]):
    """Takes bytes as they come, and gives the messages that are whole."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[M]:
        held, at = self._held, 0
        messages: list[M] = []
        held += data
        while len(held) - at >= _LENGTH.size:
            end = at + _LENGTH.size + _LENGTH.unpack_from(held, at)[0]
            if end > len(held):
                break
            messages.append(pickle.loads(memoryview(held)[at + _LENGTH.size : end]))  # noqa: S301  our other half's
            at = end
        del held[:at]
        return messages
