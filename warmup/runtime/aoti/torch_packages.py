"""Runs packages on torch's tensors through the C interface, and converts torch's tensors to its handles and back.

An AtenTensorHandle has a single owner, and passing the handle on passes the ownership. A handle of libtorch is one
of torch's tensors; on a CPU a tensor can also use the memory of another library's tensor.

`torch._inductor.aoti_load_package` is not used: it imports Dynamo and Inductor, which takes longer than the rest of
a start.
"""

import ctypes
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from snapcap.models.layers.weights import RegionFunction
from snapcap.warmup.artifacts.manifest import VerifiedFile
from snapcap.warmup.runtime.aoti.native import Libtorch, NativeTensor
from snapcap.warmup.runtime.aoti.packages import Container, Containers
from snapcap.warmup.runtime.model import AotBackend, Model

# torch's Python module passes handles in capsules without a name.
_unpack = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_pack = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def tensor_of(handle: int) -> Tensor:
    """Returns the tensor of a handle, and takes ownership of the handle."""
    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_pack(handle, None, None))


def handles_of(tensors: Sequence[Tensor]) -> list[int]:
    """Returns a handle of each tensor. The caller owns the handles."""
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return [_unpack(capsule, None) for capsule in capsules]


def tensor_over(tensor: NativeTensor) -> Tensor:
    """Returns a torch tensor over the memory of a native CPU tensor, which it keeps alive."""
    dtype = getattr(torch, tensor.spec[0])
    made = torch.from_numpy(tensor.array)
    return made if made.dtype == dtype else made.view(dtype)


def over_tensor(libtorch: Libtorch, tensor: Tensor) -> NativeTensor:
    """Returns a native tensor over the memory of a torch CPU tensor, which it keeps alive."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    handle = libtorch.over(tensor.data_ptr(), dtype, tensor.shape, tensor.stride())
    return NativeTensor(libtorch, handle, owner=tensor)


def torch_backend(
    entries: Mapping[str, VerifiedFile], input_specs: Mapping[str, Any], model: Model[Tensor]
) -> AotBackend[Tensor]:
    """Returns the `aot` backend for a model of torch's tensors."""
    device = model.state.tokens.device
    containers, function = Containers(str(device)), partial(function_of, device=device)
    return AotBackend(entries, input_specs, model, containers, function, lambda region: region.function)


def open_package(package: VerifiedFile, device: torch.device) -> RegionFunction:
    """Returns the package's function, which has the inputs and the output tensor of its region.

    The package is opened only from verified bytes. Nothing checks the inputs of a call: they must have the shapes,
    strides and dtypes for which the package was compiled. Raises PackageError if the file cannot be opened."""
    return function_of(Containers(str(device)).open(package.path.name, package), device)


def function_of(container: Container, device: torch.device) -> RegionFunction:
    """Returns the function of an open package on a device. The function raises AotiError if it fails."""
    on_gpu, index = device.type == "cuda", device.index or 0

    def call(*inputs: Tensor) -> Tensor:
        handles = handles_of(inputs)
        # `torch.cuda.current_stream` would make a Python object at every call.
        stream = torch._C._cuda_getCurrentRawStream(index) if on_gpu else None
        return tensor_of(container.run((ctypes.c_void_p * len(handles))(*handles), stream))

    return call
