"""Makes tensors on a CPU, and opens packages for tensors on any device, without torch's Python module.

A CPU tensor is numpy's memory with a handle of libtorch, or of the CPU library. The C functions are declared in
torch/csrc/inductor/aoti_torch/c/shim.h, which torch keeps stable, because packages of earlier versions of torch
must work; and in ATen/Parallel.h (`at::set_num_threads`, called by its mangled name).
"""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from snapcap.models.dataclass import dataclass
from snapcap.models.memory.memory import HostMemory, Spec, row_major
from snapcap.models.regions.table import Region, RegionCall, Weights
from snapcap.models.weights.prepared import MappedWeights, PreparedTensor
from snapcap.warmup.runtime.aoti.packages import AotiError, Container

_SET_NUM_THREADS = "_ZN2at15set_num_threadsEi"
_KINDS: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.uint16,  # the bits of 16-bit floats: numpy only stores them here
    "bfloat16": np.uint16,
    "int64": np.int64,
    "uint8": np.uint8,
    "int8": np.int8,
    "bool": np.bool_,
}
_Int, _Pointer, _Lengths = ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)
_ALLOCATION = (ctypes.c_int64, _Lengths, _Lengths, _Int, _Int, _Int, _Pointer)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "aoti_torch_create_tensor_from_blob": (
        *(_Pointer, ctypes.c_int64, _Lengths, _Lengths, ctypes.c_int64),
        *(_Int, _Int, _Int, _Pointer),
    ),
    "aoti_torch__reinterpret_tensor": (_Pointer, ctypes.c_int64, _Lengths, _Lengths, ctypes.c_int64, _Pointer),
    "aoti_torch_copy_": (_Pointer, _Pointer, _Int),
    "aoti_torch_new_tensor_handle": (_Pointer, _Pointer),
    "aoti_torch_delete_tensor_object": (_Pointer,),
    "aoti_torch_get_data_ptr": (_Pointer, _Pointer),
    "aoti_torch_get_dim": (_Pointer, _Pointer),
    "aoti_torch_get_sizes": (_Pointer, _Pointer),
    "aoti_torch_get_strides": (_Pointer, _Pointer),
    "aoti_torch_get_dtype": (_Pointer, _Pointer),
}


class Libtorch:
    """Makes and describes tensors through AtenTensorHandles. The caller owns each returned handle.

    Calls take microseconds and keep Python's interpreter lock, except for the call that allocates."""

    def __init__(self, library: int, cuda: int | None = None) -> None:
        """``library``: the handle of libtorch, or of the CPU library. ``cuda``: the index of the tensors' GPU;
        None: they are on the CPU. Raises AotiError if this version lacks a function."""
        functions = ctypes.PyDLL(None, handle=library)
        try:
            for name, arguments in _SIGNATURES.items():
                getattr(functions, name).argtypes = arguments
            self._set_num_threads = functions[_SET_NUM_THREADS]
            self._allocate = ctypes.CDLL(None, handle=library).aoti_torch_empty_strided
            self._allocate.argtypes = _ALLOCATION
            self._dtypes = {name: int(functions[f"aoti_torch_dtype_{name}"]()) for name in _KINDS}
            kind = "cpu" if cuda is None else "cuda"
            self._device = int(functions[f"aoti_torch_device_type_{kind}"]()), cuda or 0  # type and index
        except AttributeError as error:
            raise AotiError(f"this libtorch is of another version: {error}") from error
        self._functions = functions
        self._names = {code: name for name, code in self._dtypes.items()}
        # Prepared once, because this function is called for every input of every run.
        self.duplicate = functions.aoti_torch_new_tensor_handle
        self.delete = functions.aoti_torch_delete_tensor_object

    def set_num_threads(self, count: int) -> None:
        """Sets the threads of the calling thread's operations. The CPU library uses at most one for each CPU."""
        self._set_num_threads(_Int(count))

    def over(self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> int:
        """Returns the handle of a tensor over memory of the device, which must outlive the tensor. Strides in
        elements. Must not be called while launches are recorded."""
        lengths, tensor = ctypes.c_int64 * len(shape), _Pointer()
        self._call(
            "aoti_torch_create_tensor_from_blob",
            *(address, len(shape), lengths(*shape), lengths(*strides), 0),
            *(self._dtypes[dtype], *self._device, ctypes.byref(tensor)),
        )
        return tensor.value or 0

    def empty(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> int:
        """Returns the handle of a new, uninitialised tensor. Raises AotiError if there is no memory for it."""
        lengths, tensor = ctypes.c_int64 * len(shape), _Pointer()
        arguments = (len(shape), lengths(*shape), lengths(*strides), self._dtypes[dtype], *self._device)
        if self._allocate(*arguments, ctypes.byref(tensor)) != 0:
            raise AotiError("aoti_torch_empty_strided failed")
        return tensor.value or 0

    def view(self, tensor: int, shape: Sequence[int], strides: Sequence[int], offset: int) -> int:
        """Returns the handle of a view of a tensor. ``offset``: elements from the tensor's first element."""
        lengths, made = ctypes.c_int64 * len(shape), _Pointer()
        self._call(
            "aoti_torch__reinterpret_tensor",
            *(tensor, len(shape), lengths(*shape), lengths(*strides), offset, ctypes.byref(made)),
        )
        return made.value or 0

    def copy(self, target: int, source: int) -> None:
        """Copies the source's values to a target of the same shape, on the current stream."""
        self._call("aoti_torch_copy_", target, source, 1)

    def another(self, tensor: int) -> int:
        """Returns another handle of a tensor."""
        handle = _Pointer()
        self._call("aoti_torch_new_tensor_handle", tensor, ctypes.byref(handle))
        return handle.value or 0

    def describe(self, tensor: int) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
        """Returns the address, dtype, shape and strides (in elements) of a tensor. Raises AotiError if regions
        return no such dtype."""
        address, dimensions, code = _Pointer(), ctypes.c_int64(), _Int()
        sizes, strides = _Lengths(), _Lengths()
        for name, result in (
            ("data_ptr", address),
            ("dim", dimensions),
            ("dtype", code),
            ("sizes", sizes),
            ("strides", strides),
        ):
            self._call(f"aoti_torch_get_{name}", tensor, ctypes.byref(result))
        if code.value not in self._names:
            raise AotiError(f"a package returned a tensor of dtype {code.value}")
        count = dimensions.value
        return address.value or 0, self._names[code.value], tuple(sizes[:count]), tuple(strides[:count])

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._functions, name)(*arguments) != 0:
            raise AotiError(f"{name} failed")


_ALIGNMENT = 64  # bytes, as in torch's own allocator
PREPARED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I8": "int8", "U8": "uint8"}


class NativeTensor:
    """Owns a tensor of libtorch, which is freed with this object."""

    __slots__ = ("_array", "_described", "_libtorch", "_owner", "handle")

    def __init__(
        self, libtorch: Libtorch, handle: int, array: "np.ndarray[Any, Any] | None" = None, owner: object = None
    ) -> None:
        """``array``: the numpy array with the tensor's memory. ``owner``: else the object that owns the memory.
        With neither, the tensor owns its memory."""
        self._libtorch = libtorch
        self._array = array
        self._owner = owner
        self._described: tuple[int, str, tuple[int, ...], tuple[int, ...]] | None = None
        self.handle = handle

    def __del__(self) -> None:
        self._libtorch.delete(self.handle)

    @property
    def array(self) -> "np.ndarray[Any, Any]":
        """The tensor's memory as an array, which keeps the tensor alive."""
        return np.asarray(self) if self._array is None else self._array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Describes the tensor's memory to numpy."""
        address, dtype, shape, strides = self.described
        kind = np.dtype(_KINDS[dtype])
        steps = tuple(step * kind.itemsize for step in strides)
        return {"version": 3, "typestr": kind.str, "shape": shape, "strides": steps, "data": (address, False)}

    @property
    def described(self) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
        """The address, dtype, shape and strides, which never change."""
        if self._described is None:
            self._described = self._libtorch.describe(self.handle)
        return self._described

    @property
    def address(self) -> int:
        return self.described[0]

    @property
    def spec(self) -> Spec:
        """The dtype, shape and strides."""
        return self.described[1:]


class NativeMemory(HostMemory[NativeTensor]):
    """Allocates CPU buffers that packages can take as inputs."""

    def __init__(self, libtorch: Libtorch) -> None:
        self._libtorch = libtorch

    def zeros(self, dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> NativeTensor:
        if strides is not None and tuple(strides) != row_major(shape):
            raise ValueError(f"buffers of a CPU lie row by row, not in strides of {tuple(strides)}")
        kind = np.dtype(_KINDS[dtype])
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        memory = np.zeros(size + _ALIGNMENT, np.uint8)  # zero pages of the kernel, which need no second write
        first = -memory.__array_interface__["data"][0] % _ALIGNMENT
        return self._over(memory[first : first + size].view(kind).reshape(tuple(shape)), dtype)

    def spec(self, buffer: NativeTensor) -> Spec:
        return buffer.spec

    def view(self, buffer: NativeTensor, *index: int | slice) -> NativeTensor:
        return self._over(buffer.array[index], buffer.spec[0])

    def array(self, buffer: NativeTensor) -> "np.ndarray[Any, Any]":
        return buffer.array

    def weights(self, mapped: MappedWeights) -> Weights[NativeTensor]:
        """Returns the weights of a file. The tensors are the file's mapped pages."""
        tensors = {
            name: self._mapped(mapped.memory, mapped.begin, tensor)
            for name, tensor in mapped.header.tensors.items()
        }
        return Weights.of_names(mapped.header.regions, tensors)

    def _mapped(self, memory: mmap.mmap, begin: int, tensor: PreparedTensor) -> NativeTensor:
        dtype = PREPARED_DTYPES[tensor.dtype]
        kind = np.dtype(_KINDS[dtype])
        steps = tuple(step * kind.itemsize for step in tensor.strides)
        array: np.ndarray[Any, Any] = np.ndarray(tensor.shape, kind, memory, begin + tensor.offset, steps)
        return self._over(array, dtype)

    def _over(self, array: "np.ndarray[Any, Any]", dtype: str) -> NativeTensor:
        strides = [step // array.itemsize for step in array.strides]
        address = array.__array_interface__["data"][0]
        return NativeTensor(self._libtorch, self._libtorch.over(address, dtype, array.shape, strides), array)


_HANDLE_BYTES = ctypes.sizeof(ctypes.c_void_p)


@dataclass(frozen=True)
class NativePackages:
    """Calls packages and regions with tensors that are made without torch.

    stream: the device thread's stream of a GPU. threads: CPU threads of an eager operation."""

    libtorch: Libtorch
    stream: int | None = None
    threads: int | None = None

    def function_of(self, container: Container) -> RegionCall:
        """Returns the function of an open package. The caller keeps the inputs: the function passes copies of their
        handles to the container. The function raises AotiError if it fails."""
        libtorch, duplicate, stream = self.libtorch, self.libtorch.duplicate, self.stream

        def call(*inputs: NativeTensor) -> NativeTensor:
            given = (ctypes.c_void_p * len(inputs))()
            place = ctypes.addressof(given)
            for tensor in inputs:
                if duplicate(tensor.handle, place) != 0:
                    raise AotiError("an input cannot be handed over")
                place += _HANDLE_BYTES
            return NativeTensor(libtorch, container.run(given, stream))

        return call

    def eager(self, region: Region) -> RegionCall:
        """Returns the region's own function. Imports torch's module: slow, but the request succeeds."""
        import torch  # noqa: PLC0415  no other call needs it

        from snapcap.warmup.runtime.aoti.torch_packages import (  # noqa: PLC0415  imports torch
            handles_of,
            over_tensor,
            tensor_of,
            tensor_over,
        )

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        function, libtorch = region.function, self.libtorch

        def on_host(*inputs: NativeTensor) -> NativeTensor:
            return over_tensor(libtorch, function(*map(tensor_over, inputs)))

        def on_gpu(*inputs: NativeTensor) -> NativeTensor:
            handles = [libtorch.another(tensor.handle) for tensor in inputs]
            return NativeTensor(libtorch, handles_of([function(*map(tensor_of, handles))])[0])

        return on_host if self.stream is None else on_gpu
