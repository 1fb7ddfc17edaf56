"""Defines the interface of a device, and implements it for a CPU. Imports no torch.

A CPU has finished its work when a call returns, and its memory is the host's."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from snapcap.models.dataclass import dataclass
from snapcap.models.memory.memory import B, HostMemory, Memory
from snapcap.warmup.machine.worker import fulfil

B_co = TypeVar("B_co", covariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
T = TypeVar("T")
Pixels = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]
# "failed": the device answers, so only the work failed. "lost": every later call fails too (a sticky CUDA error: a
# kernel's assertion, an illegal address, a GPU that has fallen off its bus); only a new process can use the device.
DeviceHealth = Literal["failed", "out_of_memory", "lost"]


@dataclass(frozen=True)
class PendingTokens:
    """Holds a pending copy to the host: tokens [rows] int64, and outcomes of beam searches [rows, L + 1] int64."""

    arrived: Callable[[], None]
    tokens: "np.ndarray[Any, Any]"
    outcomes: "np.ndarray[Any, Any] | None" = None

    def result(self) -> list[int]:
        """Returns a token for each row. Waits for the step that made the tokens, but not for later steps."""
        self.arrived()
        values: list[int] = self.tokens.tolist()
        return values

    def hypotheses(self) -> dict[int, list[int]]:
        """Returns the best hypothesis of each ended search by slot: the start token, the prompt, and the generated
        tokens including the end token. Waits as ``result`` does."""
        if self.outcomes is None:
            return {}
        self.arrived()
        ended = self.outcomes[:, -1].nonzero()[0].tolist()
        return {slot: self.outcomes[slot, : self.outcomes[slot, -1]].tolist() for slot in ended}


class NoRoomError(RuntimeError):
    """Says that there is too little memory to record launches; they can run unrecorded."""


class Timer(Protocol):
    """Measures the seconds of work on the device, from the timer's creation to ``stop``."""

    def stop(self) -> "Timer": ...

    def seconds(self) -> float:
        """Returns the seconds. Waits for the end of the work."""


class Staging(Protocol):
    """Copies batches of images to the encoder's buffers."""

    def copy(self, images: Sequence[Pixels], slots: Sequence[int]) -> None:
        """Copy images [height, width, 3] uint8 and their slots into the first rows, for later launches. Waits for
        the upload of the previous batch, which is usually over."""


class Readback(Protocol[B_contra]):
    """Copies tokens to the host directly after the step that makes them, before the next step overwrites them."""

    def start(self, rows: int, outcomes: B_contra | None = None) -> PendingTokens:
        """Copy the first ``rows`` tokens after the work launched so far. ``outcomes``: the static buffer
        [slots, L + 1] int64 of beam searches; None if no row searches."""


class Captured(Protocol[B_co]):
    """Holds recorded launches. A replay returns the buffer with its result."""

    def replay(self) -> B_co: ...


class CpuLanes:
    """Shares the CPUs between encodes and decode steps, if an operation leaves a CPU free. Only the device thread
    calls it.

    A single request gets all CPUs for each operation. With more requests, each operation has the usual number of
    threads, and images are encoded on another thread while decode steps continue: unlike the threads of one
    operation, two operations on two CPUs never wait for each other."""

    def __init__(self, set_threads: Callable[[int], None], usual: int, alone: int) -> None:
        """``set_threads`` sets the number of threads of an operation, for all threads that run operations:
        ``usual`` with several requests, ``alone`` with one request."""
        self._set_threads = set_threads
        self._counts = {False: usual, True: alone}
        self._alone: bool | None = None
        self._works: queue.SimpleQueue[Callable[[], None]] | None = None

    def serve(self, alone: bool) -> None:
        """Sets the number of threads of later operations. ``alone``: there is only one request."""
        if alone is not self._alone:
            self._alone = alone
            self._set_threads(self._counts[alone])

    def beside(self, work: Callable[[], T]) -> "Future[T]":
        """Runs ``work`` on the thread for encodes, after earlier work."""
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
        """The sharing of CPUs, if encodes may run in parallel with decode steps; else None."""

    @property
    def memory(self) -> Memory[B]: ...

    @property
    def runs_ahead(self) -> bool:
        """True if the device works asynchronously. Then a step may be launched before the last step's tokens are
        read, and launches can be recorded."""

    def staging(self, pixels: B, slots: B) -> Staging:
        """Returns the staging for the encoder's inputs ``pixels`` [slots, height, width, 3] uint8 and ``slots``
        [slots] int64."""

    def readback(self, tokens: B) -> Readback[B]:
        """Returns the readback of ``tokens`` [slots] int64, the static buffer that every step writes."""

    def read(self, buffer: B) -> "np.ndarray[Any, Any]":
        """Returns a copy of a buffer on the host, except for 16-bit floats. Waits for the device."""

    def record(self, run: Callable[[], B]) -> Captured[B]:
        """Record the launches of ``run`` without executing them. ``run`` must have run once before. Raises
        NoRoomError if there was too little memory to record."""

    def timer(self) -> Timer: ...

    def wait(self) -> None:
        """Waits until the device has finished all its work."""

    def health(self, error: Exception) -> DeviceHealth:
        """Returns the health of the device after an error of its work."""

    def allocated_bytes(self) -> int:
        """Returns the bytes that the process has allocated on a GPU; 0 on a CPU."""


class CpuDevice(Generic[B]):
    """Implements `Device` in the host's memory."""

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
    """Implements `Timer` with the host's clock."""

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
