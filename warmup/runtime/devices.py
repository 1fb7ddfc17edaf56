"""Defines what a runner asks of a device, and drives a CPU. No torch.

The work of a CPU ends when a call returns, and its memory is the host's."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from snapcap.models.dataclass import dataclass
from snapcap.models.memory.host import HostMemory
from snapcap.models.memory.memory import B, Memory
from snapcap.warmup.machine.worker import fulfil

B_co = TypeVar("B_co", covariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
T = TypeVar("T")
Pixels = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]
# "failed": it answers, so what failed was the work. "lost": every later call fails too (a CUDA error that sticks:
# a kernel's assertion, an illegal address, a GPU that has fallen off its bus); only a new process can go on.
DeviceHealth = Literal["failed", "out_of_memory", "lost"]


@dataclass(frozen=True)
class PendingTokens:
    """Tokens [rows] int64 on their way to the host, and what beam searches have come to, [rows, L + 1] int64."""

    arrived: Callable[[], None]
    tokens: "np.ndarray[Any, Any]"
    outcomes: "np.ndarray[Any, Any] | None" = None

    def result(self) -> list[int]:
        """Returns a token for each row. Waits until the step that made the tokens has ended, not for later
        steps."""
        self.arrived()
        values: list[int] = self.tokens.tolist()
        return values

    def hypotheses(self) -> dict[int, list[int]]:
        """By slot, the best hypothesis of each search that has ended: the start token, the prompt, and what was
        generated with its end. Waits as ``result`` does."""
        if self.outcomes is None:
            return {}
        self.arrived()
        ended = self.outcomes[:, -1].nonzero()[0].tolist()
        return {slot: self.outcomes[slot, : self.outcomes[slot, -1]].tolist() for slot in ended}


class NoRoomError(RuntimeError):
    """Too little memory to record launches now; they can be made all the same."""


class Timer(Protocol):
    """Seconds that work takes on the device, from the timer's making to ``stop``."""

    def stop(self) -> "Timer": ...

    def seconds(self) -> float:
        """Waits for the end of the work."""
        ...


class Staging(Protocol):
    """Hands batches of images over to the encoder's buffers."""

    def copy(self, images: Sequence[Pixels], slots: Sequence[int]) -> None:
        """Images [height, width, 3] and slots into the first rows; what is launched from now on finds them. Waits
        for the upload of the last batch, which the device has long made."""
        ...


class Readback(Protocol[B_contra]):
    """Copies tokens to the host right behind the step that makes them, so that the next one may overwrite them."""

    def start(self, rows: int, outcomes: B_contra | None = None) -> PendingTokens:
        """Copy the first ``rows`` tokens as they are at this point; ``outcomes``: the static buffer [slots, L + 1]
        of beam searches, when a row is one."""
        ...


class Captured(Protocol[B_co]):
    """Launches that were recorded, and the buffer that a replay leaves its result in."""

    def replay(self) -> B_co: ...


class CpuLanes:
    """Shares the CPUs between encodes and decode steps, if an operation leaves a CPU free. Only the device thread
    calls it.

    A single request gets all CPUs for each operation. With more requests, each operation has the usual number of
    threads, and an image is encoded on a thread of its own while decode steps go on: two operations on two CPUs
    lose nothing by waiting for each other, as the threads of one operation do."""

    def __init__(self, set_threads: Callable[[int], None], usual: int, alone: int) -> None:
        """``set_threads`` sets the threads of an operation, for all threads that run one: ``usual`` with several
        requests, ``alone`` with one."""
        self._set_threads = set_threads
        self._counts = {False: usual, True: alone}
        self._alone: bool | None = None
        self._works: queue.SimpleQueue[Callable[[], None]] | None = None

    def serve(self, alone: bool) -> None:
        """Sets the threads of the operations from now on. ``alone``: there is only one request."""
        if alone is not self._alone:
            self._alone = alone
            self._set_threads(self._counts[alone])

    def beside(self, work: Callable[[], T]) -> "Future[T]":
        """Runs ``work`` on the thread for encodes, after the work that it was given before."""
        if self._works is None:
            self._works = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._works,), name="encodes", daemon=True).start()
        future: Future[T] = Future()
        self._works.put(partial(fulfil, future, work))
        return future


def _work(works: "queue.SimpleQueue[Callable[[], None]]") -> None:
    while True:
        works.get()()


class Device(Protocol[B]):
    """Protocol of the device that a runner works on. Only the device thread calls its methods."""

    @property
    def lanes(self) -> CpuLanes | None:
        """How CPUs are shared, if an encode may run beside decode steps."""
        ...

    @property
    def memory(self) -> Memory[B]: ...

    @property
    def runs_ahead(self) -> bool:
        """True if the device works while the host goes on. Then a step may be launched before the last step's
        tokens are read, and launches can be recorded."""
        ...

    def staging(self, pixels: B, slots: B) -> Staging:
        """``pixels`` [slots, height, width, 3] uint8 and ``slots`` [slots] int64: what the encoder reads."""
        ...

    def readback(self, tokens: B) -> Readback[B]:
        """``tokens``: the static buffer [slots] that every step writes."""
        ...

    def read(self, buffer: B) -> "np.ndarray[Any, Any]":
        """A copy on the host of numbers that are not 16-bit floats; waits for the device."""
        ...

    def record(self, run: Callable[[], B]) -> Captured[B]:
        """Record what ``run`` launches, which has run once before; nothing is launched. Raises NoRoomError if
        nothing was recorded."""
        ...

    def timer(self) -> Timer: ...

    def wait(self) -> None:
        """Waits until the device has finished all its work."""
        ...

    def health(self, error: Exception) -> DeviceHealth:
        """Returns the health of the device after an error of its work."""
        ...

    def allocated_bytes(self) -> int:
        """Bytes the process holds on a GPU; 0 on a CPU."""
        ...


class CpuDevice(Generic[B]):
    """A `Device` over the memory of the host."""

    runs_ahead = False

    def __init__(self, memory: HostMemory[B], lanes: CpuLanes | None = None) -> None:
        self.memory = memory
        self.lanes = lanes

    def staging(self, pixels: B, slots: B) -> "_Staging":
        return _Staging(self.memory.array(pixels), self.memory.array(slots))

    def readback(self, tokens: B) -> "_Readback[B]":
        return _Readback(self.memory, tokens)

    def read(self, buffer: B) -> "np.ndarray[Any, Any]":
        return self.memory.array(buffer).copy()

    def record(self, run: Callable[[], B]) -> Captured[B]:
        raise NotImplementedError("a CPU records no launches")

    def timer(self) -> "CpuTimer":
        return CpuTimer()

    def wait(self) -> None:
        """Does nothing: a CPU has finished when a call returns."""

    def health(self, error: Exception) -> DeviceHealth:
        memory = isinstance(error, MemoryError) or "out of memory" in str(error)
        return "out_of_memory" if memory else "failed"

    def allocated_bytes(self) -> int:
        return 0


class CpuTimer:
    """Times what is done meanwhile."""

    def __init__(self) -> None:
        self._started = self._stopped = time.perf_counter()

    def stop(self) -> "CpuTimer":
        self._stopped = time.perf_counter()
        return self

    def seconds(self) -> float:
        return self._stopped - self._started


class _Staging:
    def __init__(self, pixels: "np.ndarray[Any, Any]", slots: "np.ndarray[Any, Any]") -> None:
        self._pixels, self._slots = pixels, slots

    def copy(self, images: Sequence[Pixels], slots: Sequence[int]) -> None:
        np.stack(images, out=self._pixels[: len(images)])
        self._slots[: len(slots)] = slots


class _Readback(Generic[B]):
    def __init__(self, memory: HostMemory[B], tokens: B) -> None:
        self._memory, self._tokens = memory, memory.array(tokens)

    def start(self, rows: int, outcomes: B | None = None) -> PendingTokens:
        copied = None if outcomes is None else self._memory.array(outcomes)[:rows].copy()
        return PendingTokens(lambda: None, self._tokens[:rows].copy(), copied)
