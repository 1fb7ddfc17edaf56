"""Makes tensors of a GPU for packages without torch's Python module: libtorch's own memory, copied by CUDA."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from snapcap.models.memory.memory import CopySlots, Spec, row_major
from snapcap.models.weights.prepared.mapped import MappedWeights
from snapcap.models.weights.sets import Weights
from snapcap.warmup.runtime.aoti.cuda_runtime import CudaRuntime
from snapcap.warmup.runtime.aoti.cuda_upload import upload
from snapcap.warmup.runtime.aoti.libtorch import Libtorch
from snapcap.warmup.runtime.aoti.native_tensors import ITEM_BYTES, PREPARED_DTYPES, NativeTensor


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
    """Copies slots by a launch for each buffer, without a wait: rows as bytes; and by libtorch what a slot has in
    every layer, as the driver's copies of rows that are far apart take longer."""

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
        for source, target in zip(sources, targets, strict=True):
            for address, width in self._rows:
                self._cuda.copy(address + target * width, address + source * width, width)
            for to, of in zip(self._held(target), self._held(source), strict=True):
                self._libtorch.copy(to.handle, of.handle)

    def _held(self, slot: int) -> list[NativeTensor]:
        """Views of what a slot holds in every layer, made when it is first asked for."""
        held = self._views.get(slot)
        if held is None:
            held = [self._memory.view(buffer, slice(None), slot) for buffer in self._layered]
            self._views[slot] = held
        return held
