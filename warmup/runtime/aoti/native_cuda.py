"""Drives a CUDA device through its runtime and libtorch's C interface, without torch's Python module."""

import contextlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np

from snapcap.models.dataclass import dataclass
from snapcap.warmup.runtime.aoti.cuda_runtime import CudaError, CudaRuntime, array_at
from snapcap.warmup.runtime.aoti.libtorch import Libtorch
from snapcap.warmup.runtime.aoti.native_cuda_tensors import NativeCudaMemory
from snapcap.warmup.runtime.aoti.native_tensors import NativeTensor
from snapcap.warmup.runtime.devices.device import Captured, DeviceHealth, PendingTokens, Pixels

_COPIERS = 4  # threads, each with a piece of pinned memory: 113 MB take 7.5 ms, and 12 with two, 20 with one
_PIECE_BYTES = 4 << 20  # or one image
_LEAST_FREE = 0.02  # share of the device's memory: with less free, a failure counts as a lack of memory


class NativeCudaDevice:
    """A `Device` that works while the host goes on."""

    runs_ahead = True

    def __init__(self, libtorch: Libtorch, cuda: CudaRuntime) -> None:
        self._cuda = cuda
        self.memory = NativeCudaMemory(libtorch, cuda)

    def staging(self, pixels: NativeTensor, slots: NativeTensor) -> "_Staging":
        return _Staging(self._cuda, self.memory, pixels, slots)

    def readback(self, tokens: NativeTensor) -> "_Readback":
        return _Readback(self._cuda, tokens)

    def read(self, buffer: NativeTensor) -> "np.ndarray[Any, Any]":
        address, dtype, shape, _ = buffer.described
        values = np.empty(shape, dtype)
        self._cuda.copy(_address(values), address, values.nbytes)
        self._cuda.wait()
        return values

    def record(self, run: Callable[[], NativeTensor]) -> Captured[NativeTensor]:
        outputs: list[NativeTensor] = []
        graph = self._cuda.capture(lambda: outputs.append(run()))
        return _Graph(partial(self._cuda.launch, graph), outputs[0])

    def timer(self) -> "_Timer":
        return _Timer(self._cuda)

    def wait(self) -> None:
        self._cuda.wait()

    def health(self, error: Exception) -> DeviceHealth:
        """Classifies an error. Waits for the device, as a kernel's error is known only at its end. A package
        reports the reason of a failure only on the standard error, so a lack of memory is inferred from the free
        bytes."""
        try:
            self._cuda.wait()
            free, total = self._cuda.free_bytes()
        except CudaError:
            return "lost"
        if self._cuda.broken is not None:
            return "lost"
        short = "out of memory" in str(error) or free < total * _LEAST_FREE
        return "out_of_memory" if short else "failed"

    def allocated_bytes(self) -> int:
        return self.memory.allocated_bytes


@dataclass(frozen=True)
class _Graph:
    launch: Callable[[], None]
    output: NativeTensor

    def replay(self) -> NativeTensor:
        self.launch()
        return self.output


class _Staging:
    """Copies images to the GPU on a separate stream, as `devices.cuda` does; the diagram there gives the reason.

    The images go through small pieces of pinned memory, because pinning enough for the largest bucket takes 50 ms
    of a start. Images that fill more than a piece are copied by several threads: the host fills some pieces while
    the device reads others.
    """

    def __init__(
        self, cuda: CudaRuntime, memory: NativeCudaMemory, pixels: NativeTensor, slots: NativeTensor
    ) -> None:
        self._cuda = cuda
        self._targets = pixels, slots
        self._arrival = [memory.zeros(*target.spec) for target in self._targets]
        _, (rows, *image), _ = pixels.spec
        self._image_bytes = math.prod(image)
        held = min(rows, max(1, _PIECE_BYTES // self._image_bytes))
        self._pieces = [_Piece(cuda, held, image) for _ in range(min(_COPIERS, -(-rows // held)))]
        enter = partial(cuda.call, "cudaSetDevice", cuda.index)
        self._copiers = ThreadPoolExecutor(len(self._pieces), "snapcap-images", enter)
        self._slots = array_at(cuda.pinned(rows * 8), np.int64, (rows,))
        self._stream = cuda.new_stream()
        self._arrived, self._taken = cuda.new_event(), cuda.new_event()
        cuda.record(self._taken)  # the buffers have been made

    def __del__(self) -> None:
        with contextlib.suppress(CudaError):  # the device may be lost
            self._cuda.wait(self._arrived)
            self._cuda.call("cudaFreeHost", _address(self._slots))
            for event in (self._arrived, self._taken):
                self._cuda.call("cudaEventDestroy", event)
            self._cuda.call("cudaStreamDestroy", self._stream)

    def copy(self, images: Sequence[Pixels], slots: Sequence[int]) -> None:
        cuda, (pixels, arrived_slots) = self._cuda, (arrival.address for arrival in self._arrival)
        cuda.wait(self._arrived)  # the host's buffers have been read
        cuda.call("cudaStreamWaitEvent", self._stream, self._taken, 0)
        self._send(images, pixels)
        self._slots[: len(slots)] = slots
        cuda.copy(arrived_slots, _address(self._slots), len(slots) * 8, self._stream)
        cuda.record(self._arrived, self._stream)
        cuda.call("cudaStreamWaitEvent", cuda.stream, self._arrived, 0)
        sizes = len(images) * self._image_bytes, len(slots) * 8
        for target, arrival, size in zip(self._targets, self._arrival, sizes, strict=True):
            cuda.copy(target.address, arrival.address, size)
        cuda.record(self._taken)

    def _send(self, images: Sequence[Pixels], target: int) -> None:
        """Onto the copies' stream; returns when all have been given to it."""
        rows = len(self._pieces[0].images)
        if len(images) <= rows:
            self._pieces[0].copy(images, target, self._stream)
            return

        def send(number: int) -> None:
            for first in range(number * rows, len(images), len(self._pieces) * rows):
                run, place = images[first : first + rows], target + first * self._image_bytes
                self._pieces[number].copy(run, place, self._stream)

        sent = [self._copiers.submit(send, number) for number in range(len(self._pieces))]
        wait(sent)  # for all of them, also where one has failed: its memory is used again
        for each in sent:
            each.result()


class _Piece:
    """Pinned memory for some images."""

    def __init__(self, cuda: CudaRuntime, rows: int, image: Sequence[int]) -> None:
        self._cuda = cuda
        self.images = array_at(cuda.pinned(rows * math.prod(image)), np.uint8, (rows, *image))
        self._fetched = cuda.new_event()

    def __del__(self) -> None:
        with contextlib.suppress(CudaError):
            self._cuda.wait(self._fetched)
            self._cuda.call("cudaFreeHost", _address(self.images))
            self._cuda.call("cudaEventDestroy", self._fetched)

    def copy(self, images: Sequence[Pixels], target: int, stream: int) -> None:
        """Into the device's memory, once it has fetched what was here before."""
        self._cuda.wait(self._fetched)
        filled = self.images[: len(images)]
        np.stack(images, out=filled)
        self._cuda.copy(target, _address(filled), filled.nbytes, stream)
        self._cuda.record(self._fetched, stream)


def _address(array: "np.ndarray[Any, Any]") -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class _Readback:
    """Two copies may be under way: while the host reads one step's tokens, the device works on the next."""

    def __init__(self, cuda: CudaRuntime, tokens: NativeTensor) -> None:
        self._tokens = tokens
        address, _, (slots,), _ = tokens.described
        self._places = [_Place(cuda, address, slots) for _ in range(2)]

    def start(self, rows: int, outcomes: NativeTensor | None = None) -> PendingTokens:
        self._places.reverse()
        return self._places[0].copy(rows, None if outcomes is None else (outcomes.address, outcomes.spec[1][1]))


class _Place:
    """Pinned memory for one step's results."""

    def __init__(self, cuda: CudaRuntime, address: int, slots: int) -> None:
        self._cuda, self._address, self._slots = cuda, address, slots
        self._tokens = array_at(cuda.pinned(slots * 8), np.int64, (slots,))
        self._outcomes: np.ndarray[Any, Any] | None = None
        self._event = cuda.new_event()

    def copy(self, rows: int, outcomes: tuple[int, int] | None) -> PendingTokens:
        """``outcomes``: the address of the buffer, and the length of its rows."""
        tokens, copied = self._tokens[:rows], None
        self._cuda.copy(_address(tokens), self._address, tokens.nbytes)
        if outcomes is not None:
            address, length = outcomes
            if self._outcomes is None:
                pinned = self._cuda.pinned(self._slots * length * 8)
                self._outcomes = array_at(pinned, np.int64, (self._slots, length))
            copied = self._outcomes[:rows]
            self._cuda.copy(copied.__array_interface__["data"][0], address, copied.nbytes)
        self._cuda.record(self._event)
        return PendingTokens(partial(self._cuda.wait, self._event), tokens, copied)


class _Timer:
    """By events in the stream, as the host is far ahead of the device."""

    def __init__(self, cuda: CudaRuntime) -> None:
        self._cuda = cuda
        self._start, self._end = cuda.new_event(timing=True), cuda.new_event(timing=True)
        cuda.record(self._start)

    def __del__(self) -> None:
        with contextlib.suppress(CudaError):
            for event in (self._start, self._end):
                self._cuda.call("cudaEventDestroy", event)

    def stop(self) -> "_Timer":
        self._cuda.record(self._end)
        return self

    def seconds(self) -> float:
        self._cuda.wait(self._end)
        return self._cuda.seconds(self._start, self._end)
