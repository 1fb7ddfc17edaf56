"""Calls the functions that libtorch exports to packages, or the CPU library in its place.

The names are those of torch/csrc/inductor/aoti_torch/c/shim.h, which are kept stable, as packages of earlier
versions of torch have to work; and of ATen/Parallel.h, `at::set_num_threads`, by its name in the library.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from snapcap.warmup.runtime.aoti.packages import AotiError

_SET_NUM_THREADS = "_ZN2at15set_num_threadsEi"
_DTYPES = ("float32", "float16", "bfloat16", "int64", "uint8", "bool")
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
    """Makes and describes tensors by their AtenTensorHandles, each of which belongs to whoever has it.

    Every call takes microseconds at most, for which Python's lock is kept, but for that which allocates.
    """

    def __init__(self, library: int, cuda: int | None = None) -> None:
        """``library``: the handle of libtorch, or of the CPU library; ``cuda``: the index of the GPU that tensors
        are on, if any.

        Raises:
            AotiError: this version has not all of the functions.
        """
        functions = ctypes.PyDLL(None, handle=library)
        try:
            for name, arguments in _SIGNATURES.items():
                getattr(functions, name).argtypes = arguments
            self._set_num_threads = functions[_SET_NUM_THREADS]
            self._allocate = ctypes.CDLL(None, handle=library).aoti_torch_empty_strided
            self._allocate.argtypes = _ALLOCATION
            self._dtypes = {name: int(functions[f"aoti_torch_dtype_{name}"]()) for name in _DTYPES}
            kind = "cpu" if cuda is None else "cuda"
            self._device = int(functions[f"aoti_torch_device_type_{kind}"]()), cuda or 0  # type and index
        except AttributeError as error:
            raise AotiError(f"this libtorch is of another version: {error}") from error
        self._functions = functions
        self._names = {code: name for name, code in self._dtypes.items()}
        # Called for every input of every run.
        self.duplicate = functions.aoti_torch_new_tensor_handle
        self.delete = functions.aoti_torch_delete_tensor_object

    def set_num_threads(self, count: int) -> None:
        """Sets the number of threads for operations of the calling thread. The CPU library uses no more threads
        than there are CPUs."""
        self._set_num_threads(_Int(count))

    def over(self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> int:
        """The handle of a tensor over memory of the device, which must outlive it. Strides in elements. Not while
        launches are being recorded."""
        lengths, tensor = ctypes.c_int64 * len(shape), _Pointer()
        self._call(
            "aoti_torch_create_tensor_from_blob",
            *(address, len(shape), lengths(*shape), lengths(*strides), 0),
            *(self._dtypes[dtype], *self._device, ctypes.byref(tensor)),
        )
        return tensor.value or 0

    def empty(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> int:
        """The handle of a new tensor, which holds anything.

        Raises:
            AotiError: there is no memory for it.
        """
        lengths, tensor = ctypes.c_int64 * len(shape), _Pointer()
        arguments = (len(shape), lengths(*shape), lengths(*strides), self._dtypes[dtype], *self._device)
        if self._allocate(*arguments, ctypes.byref(tensor)) != 0:
            raise AotiError("aoti_torch_empty_strided failed")
        return tensor.value or 0

    def view(self, tensor: int, shape: Sequence[int], strides: Sequence[int], offset: int) -> int:
        """The handle of a part of a tensor, in the same memory; ``offset`` in elements from its first."""
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
        """Address, dtype, shape and strides in elements of a tensor.

        Raises:
            AotiError: its dtype is none of those that regions return.
        """
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
