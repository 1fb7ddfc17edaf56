"""Drives a CUDA device through its runtime and libtorch's C interface, without torch's Python module.

Tensors are libtorch's own memory, copied by CUDA. A mapped file of weights is uploaded through pinned memory:

    readers        [ file's pages → own pinned chunk ] …      several, each with one chunk
    copy stream           [ chunk → device ][ chunk → device ] …

`models.weights.read` does the same with torch's tensors, and gives the reasons. cuBLAS is loaded on a thread
beside the rest of a start, as the first product takes a tenth of a second.

The names of functions are those of the CUDA Runtime API, and of ATen/cuda/CUDAGraph.h and ATen/Context.h by their
names in the library. libtorch's graphs have a pool of the caching allocator to themselves, which no C function
gives (pytorch#196778): what a graph writes stays its own for as long as it can be replayed.
"""

import contextlib
import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import count
from typing import Any, Literal

import numpy as np

from snapcap.models.dataclass import dataclass
from snapcap.models.memory.memory import ITEM_BYTES, CopySlots, Spec, row_major, runs
from snapcap.models.regions.table import Weights
from snapcap.models.weights.prepared import MappedWeights
from snapcap.warmup.runtime.aoti.launch_ahead import GraphEdges
from snapcap.warmup.runtime.aoti.native import PREPARED_DTYPES, Libtorch, NativeTensor
from snapcap.warmup.runtime.aoti.packages import AotiError, CaptureError
from snapcap.warmup.runtime.devices import Captured, DeviceHealth, NoRoomError, PendingTokens, Pixels

_SPARE_BYTES = 1 << 16  # for an at::cuda::CUDAGraph, which is below 1 KiB
# cudaStreamCaptureMode: threads that do other things do not break a capture, and a launch that has never run may
# load its kernel.
_RELAXED = 2
_CAPTURING = 1  # cudaStreamCaptureStatusActive
_NON_BLOCKING = 1  # cudaStreamNonBlocking
_NO_TIMING = 2  # cudaEventDisableTiming
_DEFAULT = 4  # cudaMemcpyDefault: the pointers say where they point to
_LEAST_BYTES = 32 << 20  # for the executable of a graph
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_MAJOR = 75  # cudaDevAttrComputeCapabilityMajor
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
    "cudaDeviceGetAttribute": (_Pointer, ctypes.c_int, ctypes.c_int),
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
_MAKE, _DESTROY, _BEGIN, _END, _RECORDED, _INSTANTIATE, _EXECUTABLE = (
    f"{_GRAPH}C1Eb",
    f"{_GRAPH}D1Ev",
    f"{_GRAPH}13capture_beginESt4pairIyyE21cudaStreamCaptureMode",
    f"{_GRAPH}11capture_endEv",
    f"{_GRAPH}14raw_cuda_graphEv",
    f"{_GRAPH}11instantiateEv",
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
        self.recorded = False
        getattr(functions, _MAKE)(self.memory, True)  # the recorded graph is kept, to be changed
        self._destroy = getattr(functions, _DESTROY)

    def __del__(self) -> None:
        if self.recorded:
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
            self._instantiate = self._function(_INSTANTIATE, _Pointer)
            self._recorded, self._executable = (self._function(name, _Pointer) for name in (_RECORDED, _EXECUTABLE))
            self._recorded.restype = self._executable.restype = _Pointer
            make_pool = self._functions[_POOL]
            make_pool.restype = _Pool
            self._guard = waiting["aoti_torch_create_cuda_stream_guard"]
            self._release = self._function("aoti_torch_delete_cuda_stream_guard", _Pointer)
        except AttributeError as error:
            raise AotiError(f"this libtorch is of another version: {error}") from error
        self.index = index
        getattr(self._functions, _ALLOW_TF32)(context(), False)  # "highest", see `devices.torch_settings`
        self.call("cudaSetDevice", index)
        major = ctypes.c_int()
        self.call("cudaDeviceGetAttribute", ctypes.byref(major), _MAJOR, index)
        self._edges = GraphEdges.of_device(major.value)
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
        """Another thread launches on the device thread's stream, too. Raises AotiError if it cannot."""
        held = self._make_current()
        try:
            yield
        finally:
            self._release(held)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the runtime. Raises CudaError if it fails."""
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
            OSError: the driver changed a part of the graph only.
        """
        self.wait()
        if self.free_bytes()[0] < _LEAST_BYTES:
            raise NoRoomError("too little is free to record a graph: out of memory")
        graph = CudaGraph(self._functions)
        self._begin(graph.memory, self._pool, _RELAXED)
        try:
            run()
        finally:
            state = ctypes.c_int()
            self.call("cudaStreamIsCapturing", self.stream, ctypes.byref(state))
            if state.value != _CAPTURING:
                self.broken = graph  # the allocator still knows it
                raise CaptureError("a capture was broken off")
            self._end(graph.memory)
            graph.recorded = True
        if self._edges is not None:
            self._edges.launch_ahead(int(self._recorded(graph.memory)))
        self._instantiate(graph.memory)
        graph.executable = int(self._executable(graph.memory))
        return graph

    def launch(self, graph: "CudaGraph") -> None:
        """Replay a graph. Raises CudaError if it cannot be launched."""
        self.call("cudaGraphLaunch", graph.executable, self.stream)


def array_at(address: int, dtype: Any, shape: Sequence[int]) -> "np.ndarray[Any, Any]":
    """Memory of the host at an address, which must outlive the array."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    memory: Any = (ctypes.c_byte * size).from_address(address)
    return np.frombuffer(memory, kind).reshape(tuple(shape))


_SIDE = 16  # rows and columns of each matrix


@contextlib.contextmanager
def loading_cublas(library: int, libtorch: Libtorch, cuda: CudaRuntime, dtype: str) -> Iterator[None]:
    """Multiply matrices on a thread that has ended when the block has: its handle of cuBLAS is then there for the
    device thread. Errors are ignored here: packages multiply too, and report them.

    ``library``: the handle of libtorch.
    """
    thread = threading.Thread(target=_multiply, args=(library, libtorch, cuda, dtype), name="cublas", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _multiply(library: int, libtorch: Libtorch, cuda: CudaRuntime, dtype: str) -> None:
    functions = ctypes.CDLL(None, handle=library)  # without Python's lock
    with contextlib.suppress(AotiError, CudaError, AttributeError):
        cuda.call("cudaSetDevice", cuda.index)
        with cuda.current_stream():
            shape, strides = (_SIDE, _SIDE), (_SIDE, 1)
            product, left, right = (NativeTensor(libtorch, libtorch.empty(dtype, shape, strides)) for _ in range(3))
            bias = NativeTensor(libtorch, libtorch.empty(dtype, shape[:1], strides[1:]))
            handles = [ctypes.c_void_p(each.handle) for each in (product, left, right)]
            functions.aoti_torch_cuda_mm_out(*handles)
            functions.aoti_torch_cuda_addmm_out(
                *(handles[0], ctypes.c_void_p(bias.handle), *handles[1:]),
                ctypes.c_double(1.0),
                ctypes.c_double(1.0),
            )


READERS = 4
CHUNK_BYTES = 4 << 20


def upload(source: "np.ndarray[Any, np.dtype[np.uint8]]", target: int, cuda: CudaRuntime) -> None:
    """Copy bytes to an address of the device; waits for the last of them. Raises CudaError if a copy fails."""
    stream, begun = cuda.new_stream(), cuda.new_event()
    cuda.record(begun)  # the buffer has been made there
    cuda.call("cudaStreamWaitEvent", stream, begun, 0)
    chunks = count()

    def read() -> None:
        cuda.call("cudaSetDevice", cuda.index)
        address, copied = cuda.pinned(CHUNK_BYTES), cuda.new_event()
        chunk = array_at(address, np.uint8, (CHUNK_BYTES,))
        while (start := next(chunks) * CHUNK_BYTES) < len(source):
            piece = source[start : start + CHUNK_BYTES]
            cuda.wait(copied)  # the chunk's last content is on the device
            chunk[: len(piece)] = piece
            cuda.copy(target + start, address, len(piece), stream)
            cuda.record(copied, stream)
        cuda.wait(copied)
        cuda.call("cudaFreeHost", address)

    with ThreadPoolExecutor(READERS, thread_name_prefix="snapcap-weights") as pool:
        readers = [pool.submit(read) for _ in range(READERS)]
    for reader in readers:
        reader.result()


class NativeCudaMemory:
    """Buffers of a GPU. Device thread only."""

    def __init__(self, libtorch: Libtorch, cuda: CudaRuntime) -> None:
        self._libtorch, self._cuda = libtorch, cuda
        self.allocated_bytes = 0  # bytes of buffers and weights

    @property
    def kind(self) -> Literal["cuda"]:
        return "cuda"

    def zeros(self, dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> NativeTensor:
        """``strides``: of memory without gaps."""
        strides = row_major(shape) if strides is None else strides
        size = math.prod(shape) * ITEM_BYTES[dtype]
        handle = self._libtorch.empty(dtype, shape, strides)
        tensor = NativeTensor(self._libtorch, handle, owner=_Counted(self, size))
        if size:
            self._cuda.clear(tensor.address, size)
        return tensor

    def spec(self, buffer: NativeTensor) -> Spec:
        return buffer.spec

    def view(self, buffer: NativeTensor, *index: int | slice) -> NativeTensor:
        _, shape, strides = buffer.spec
        lengths, steps, offset = list(shape[len(index) :]), list(strides[len(index) :]), 0
        for place, at in reversed(list(enumerate(index))):
            if isinstance(at, int):
                offset += at * strides[place]
                continue
            start, stop, _ = at.indices(shape[place])
            offset += start * strides[place]
            lengths.insert(0, stop - start)
            steps.insert(0, strides[place])
        handle = self._libtorch.view(buffer.handle, lengths, steps, offset)
        return NativeTensor(self._libtorch, handle, owner=buffer)

    def array(self, buffer: NativeTensor) -> None:
        return None

    def write(self, buffer: NativeTensor, slots: Sequence[int], values: "np.ndarray[Any, Any]") -> None:
        """The driver takes values at once that lie in pageable memory, as these do."""
        target, dtype, _, (step, *_) = buffer.described
        if str(values.dtype) != dtype:
            raise TypeError(f"{values.dtype} is written where {dtype} is")
        values = np.ascontiguousarray(values)
        source, width, step = values.ctypes.data, values.nbytes // len(values), step * ITEM_BYTES[dtype]
        first, count = slots[0], len(slots)
        if list(slots) == list(range(first, first + count)):
            if step == width:
                self._cuda.copy(target + first * step, source, values.nbytes)
            else:
                self._cuda.copy_rows(target + first * step, step, source, width, width, count)
            return
        for place, slot in enumerate(slots):
            self._cuda.copy(target + slot * step, source + place * width, width)

    def copier(self, buffers: Sequence[tuple[NativeTensor, int]]) -> CopySlots:
        return _Copier(self, self._libtorch, self._cuda, buffers)

    def weights(self, mapped: MappedWeights) -> Weights[NativeTensor]:
        """The weights that a file was made of, in one buffer; what is launched from now on finds them."""
        size = mapped.header.size
        place = self.zeros("uint8", (size,))
        address = place.address
        upload(np.frombuffer(mapped.memory, np.uint8, size, mapped.begin), address, self._cuda)
        tensors = {
            name: NativeTensor(
                self._libtorch,
                self._libtorch.over(
                    address + each.offset,
                    PREPARED_DTYPES[each.dtype],
                    each.shape,
                    each.strides,
                ),
                owner=place,
            )
            for name, each in mapped.header.tensors.items()
        }
        return Weights.of_names(mapped.header.regions, tensors)


class _Counted:
    """Counts the bytes of a buffer until nothing holds it."""

    def __init__(self, memory: NativeCudaMemory, size: int) -> None:
        self._memory, self._size = memory, size
        memory.allocated_bytes += size

    def __del__(self) -> None:
        self._memory.allocated_bytes -= self._size


class _Copier:
    """Copies slots without a wait, by a launch for each buffer and run of slots: rows as bytes; and by libtorch
    what a slot has in every layer, as the driver's copies of rows that are far apart take longer."""

    def __init__(
        self,
        memory: NativeCudaMemory,
        libtorch: Libtorch,
        cuda: CudaRuntime,
        buffers: Sequence[tuple[NativeTensor, int]],
    ) -> None:
        self._memory, self._libtorch, self._cuda = memory, libtorch, cuda
        self._rows = []  # address, and bytes of a slot
        self._layered = [buffer for buffer, dimension in buffers if dimension]
        for buffer, dimension in buffers:
            if not dimension:
                address, dtype, _, strides = buffer.described
                self._rows.append((address, strides[0] * ITEM_BYTES[dtype]))
        self._views: dict[int, list[NativeTensor]] = {}

    def __call__(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target, slots in runs(sources, targets):
            for address, width in self._rows:
                self._cuda.copy(address + target * width, address + source * width, slots * width)
            for to, of in zip(self._held(target, slots), self._held(source, slots), strict=True):
                self._libtorch.copy(to.handle, of.handle)

    def _held(self, first: int, slots: int) -> list[NativeTensor]:
        """Returns views of what a run of slots holds in every layer. Views of a slot alone are made once."""
        held = self._views.get(first) if slots == 1 else None
        if held is None:
            run = slice(first, first + slots)
            held = [self._memory.view(buffer, slice(None), run) for buffer in self._layered]
            if slots == 1:
                self._views[first] = held
        return held


_COPIERS = 4  # threads, each with a piece of pinned memory: 113 MB take 7.5 ms, and 12 with two, 20 with one
_PIECE_BYTES = 4 << 20  # or one image
_LEAST_FREE = 0.02  # share of the device's memory: with less free, a failure counts as a lack of memory


class NativeCudaDevice:
    """A `Device` that works while the host goes on."""

    runs_ahead = True
    lanes = None

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
