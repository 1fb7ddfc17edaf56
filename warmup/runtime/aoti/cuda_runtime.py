"""Calls the CUDA runtime and libtorch's CUDA graphs, without torch's Python module.

The names are those of the CUDA Runtime API, and of ATen/cuda/CUDAGraph.h and ATen/Context.h by their names in the
library. Its graphs have a pool of the caching allocator to themselves, which no C function gives (pytorch#196778):
what a graph writes stays its own for as long as it can be replayed.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from snapcap.warmup.runtime.aoti.packages import AotiError, CaptureError
from snapcap.warmup.runtime.devices import NoRoomError

_SPARE_BYTES = 1 << 16  # for an at::cuda::CUDAGraph, which is below 1 KiB
_THREAD_LOCAL = 1  # cudaStreamCaptureMode: threads that do other things must not break a capture
_CAPTURING = 1  # cudaStreamCaptureStatusActive
_NON_BLOCKING = 1  # cudaStreamNonBlocking
_NO_TIMING = 2  # cudaEventDisableTiming
_DEFAULT = 4  # cudaMemcpyDefault: the pointers say where they point to
_LEAST_BYTES = 32 << 20  # for the executable of a graph
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_Pointer, _Size = ctypes.c_void_p, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaStreamDestroy": (_Pointer,),
    "cudaStreamWaitEvent": (_Pointer, _Pointer, ctypes.c_uint),
    "cudaEventCreateWithFlags": (_Pointer, ctypes.c_uint),
    "cudaStreamIsCapturing": (_Pointer, _Pointer),
    "cudaGraphLaunch": (_Pointer, _Pointer),
    "cudaEventDestroy": (_Pointer,),
    "cudaEventRecord": (_Pointer, _Pointer),
    "cudaEventElapsedTime": (_Pointer, _Pointer, _Pointer),
    "cudaMemcpyAsync": (_Pointer, _Pointer, _Size, ctypes.c_int, _Pointer),
    "cudaMemcpy2DAsync": (_Pointer, _Size, _Pointer, _Size, _Size, _Size, ctypes.c_int, _Pointer),
    "cudaMemsetAsync": (_Pointer, ctypes.c_int, _Size, _Pointer),
    "cudaMemGetInfo": (_Pointer, _Pointer),
}
# These wait, or take milliseconds, so that other threads run Python meanwhile.
_WAITING: dict[str, tuple[Any, ...]] = {
    "cudaDeviceSynchronize": (),
    "cudaEventSynchronize": (_Pointer,),
    "cudaSetDevice": (ctypes.c_int,),
    "cudaStreamCreateWithFlags": (_Pointer, ctypes.c_uint),
    "cudaMallocHost": (_Pointer, _Size),
    "cudaFreeHost": (_Pointer,),
}
_GRAPH = "_ZN2at4cuda9CUDAGraph"
_MAKE, _DESTROY, _BEGIN, _END, _EXECUTABLE = (
    f"{_GRAPH}C1Eb",
    f"{_GRAPH}D1Ev",
    f"{_GRAPH}13capture_beginESt4pairIyyE21cudaStreamCaptureMode",
    f"{_GRAPH}11capture_endEv",
    f"{_GRAPH}19raw_cuda_graph_execEv",
)
_CONTEXT, _ALLOW_TF32 = "_ZN2at13globalContextEv", "_ZN2at7Context18setAllowTF32CuBLASEb"
_POOL = "_ZN2at4cuda17graph_pool_handleEv"


class CudaError(RuntimeError):
    """A call that the CUDA runtime refused; one line that names it."""


class _Pool(ctypes.Structure):
    """at::cuda::MempoolId_t, a std::pair<unsigned long long, unsigned long long>."""

    _fields_ = (("first", ctypes.c_ulonglong), ("second", ctypes.c_ulonglong))


class CudaGraph:
    """An at::cuda::CUDAGraph, with its share of the pool until it is dropped."""

    def __init__(self, functions: ctypes.PyDLL) -> None:
        self.memory = ctypes.create_string_buffer(_SPARE_BYTES)
        self.executable = 0
        getattr(functions, _MAKE)(self.memory, False)
        self._destroy = getattr(functions, _DESTROY)

    def __del__(self) -> None:
        if self.executable:
            self._destroy(self.memory)


class CudaRuntime:
    """The functions, on one device, and a stream on which the calling thread launches from now on."""

    def __init__(self, library: int, index: int) -> None:
        """``library``: the handle of libtorch, which has the CUDA runtime mapped.

        Raises:
            AotiError: this version has not all of the functions.
            CudaError: the device cannot be used.
        """
        self._functions = ctypes.PyDLL(None, handle=library)
        waiting = ctypes.CDLL(None, handle=library)
        self._calls: dict[str, Any] = {}
        try:
            for functions, signatures in ((self._functions, _SIGNATURES), (waiting, _WAITING)):
                for name, arguments in signatures.items():
                    self._calls[name] = getattr(functions, name)
                    self._calls[name].argtypes = arguments
            self._function(_MAKE, _Pointer, ctypes.c_bool)
            self._function(_DESTROY, _Pointer)
            self._function(_ALLOW_TF32, _Pointer, ctypes.c_bool)
            context = self._function(_CONTEXT)
            context.restype = _Pointer
            self._begin = self._function(_BEGIN, _Pointer, _Pool, ctypes.c_int)
            self._end = self._function(_END, _Pointer)
            self._executable = self._function(_EXECUTABLE, _Pointer)
            self._executable.restype = _Pointer
            make_pool = self._functions[_POOL]
            make_pool.restype = _Pool
            self._guard = waiting["aoti_torch_create_cuda_stream_guard"]
            self._release = self._function("aoti_torch_delete_cuda_stream_guard", _Pointer)
        except AttributeError as error:
            raise AotiError(f"this libtorch is of another version: {error}") from error
        self.index = index
        getattr(self._functions, _ALLOW_TF32)(context(), False)  # "highest", see `devices.torch_settings`
        self.call("cudaSetDevice", index)
        self.stream = self.new_stream()
        self._make_current()  # for good: it is the thread's stream until that ends
        self._pool: _Pool = make_pool()
        self.broken: CudaGraph | None = None

    def _function(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._functions, name)
        function.argtypes, function.restype = arguments, None
        return function

    def _make_current(self) -> int | None:
        held = _Pointer()
        if self._guard(_Pointer(self.stream), ctypes.c_int32(self.index), ctypes.byref(held)) != 0:
            raise AotiError("the stream cannot be made the current one")
        return held.value

    @contextlib.contextmanager
    def current_stream(self) -> Iterator[None]:
        """Another thread launches on the device thread's stream, too.

        Raises:
            AotiError: it cannot.
        """
        held = self._make_current()
        try:
            yield
        finally:
            self._release(held)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the runtime.

        Raises:
            CudaError: it fails.
        """
        status = self._calls[name](*arguments)
        if status == _OUT_OF_MEMORY:
            raise CudaError(f"{name}: out of memory")
        if status != 0:
            raise CudaError(f"{name} failed with CUDA error {status}")

    def wait(self, event: int | None = None) -> None:
        """Until an event has come, or the device has done all that it was given."""
        if event is None:
            self.call("cudaDeviceSynchronize")
        else:
            self.call("cudaEventSynchronize", event)

    def new_stream(self) -> int:
        stream = _Pointer()
        self.call("cudaStreamCreateWithFlags", ctypes.byref(stream), _NON_BLOCKING)
        return stream.value or 0

    def new_event(self, timing: bool = False) -> int:
        """A place in a stream that the host can wait for."""
        event = _Pointer()
        self.call("cudaEventCreateWithFlags", ctypes.byref(event), 0 if timing else _NO_TIMING)
        return event.value or 0

    def record(self, event: int, stream: int | None = None) -> None:
        """Put an event behind what a stream (None: that of the device thread) has been given."""
        self.call("cudaEventRecord", event, self.stream if stream is None else stream)

    def seconds(self, start: int, end: int) -> float:
        """Between two events that have come."""
        elapsed = ctypes.c_float()
        self.call("cudaEventElapsedTime", ctypes.byref(elapsed), start, end)
        return elapsed.value / 1000.0

    def copy(self, target: int, source: int, size: int, stream: int | None = None) -> None:
        """Copy bytes, from the host or to it as well, on a stream (None: that of the device thread)."""
        self.call("cudaMemcpyAsync", target, source, size, _DEFAULT, self.stream if stream is None else stream)

    def clear(self, address: int, size: int) -> None:
        """Zero bytes of the device, on the stream of the device thread; no kernel of torch's is loaded for it."""
        self.call("cudaMemsetAsync", address, 0, size, self.stream)

    def copy_rows(self, target: int, to_step: int, source: int, of_step: int, width: int, rows: int) -> None:
        """Copy rows of ``width`` bytes whose beginnings are so many bytes apart."""
        self.call("cudaMemcpy2DAsync", target, to_step, source, of_step, width, rows, _DEFAULT, self.stream)

    def pinned(self, size: int) -> int:
        """The address of pinned memory of the host, which is the caller's."""
        address = _Pointer()
        self.call("cudaMallocHost", ctypes.byref(address), size)
        return address.value or 0

    def free_bytes(self) -> tuple[int, int]:
        """Returns the free and the total bytes of the device's memory."""
        free, total = _Size(), _Size()
        self.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def capture(self, run: Callable[[], object]) -> "CudaGraph":
        """Record what ``run`` launches. Waits for the device first: an error of its earlier work, or a lack of
        memory, would be a C++ exception of the capture, which nothing here can catch.

        Raises:
            CudaError: work before has failed.
            NoRoomError: there is too little memory.
            CaptureError: the capture was broken off.
        """
        self.wait()
        if self.free_bytes()[0] < _LEAST_BYTES:
            raise NoRoomError("too little is free to record a graph: out of memory")
        graph = CudaGraph(self._functions)
        self._begin(graph.memory, self._pool, _THREAD_LOCAL)
        try:
            run()
        finally:
            state = ctypes.c_int()
            self.call("cudaStreamIsCapturing", self.stream, ctypes.byref(state))
            if state.value != _CAPTURING:
                self.broken = graph  # the allocator still knows it
                raise CaptureError("a capture was broken off")
            self._end(graph.memory)
        graph.executable = int(self._executable(graph.memory))
        return graph

    def launch(self, graph: "CudaGraph") -> None:
        """Replay a graph.

        Raises:
            CudaError: it cannot be launched.
        """
        self.call("cudaGraphLaunch", graph.executable, self.stream)


def array_at(address: int, dtype: Any, shape: Sequence[int]) -> "np.ndarray[Any, Any]":
    """Memory of the host at an address, which must outlive the array."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    memory: Any = (ctypes.c_byte * size).from_address(address)
    return np.frombuffer(memory, kind).reshape(tuple(shape))
