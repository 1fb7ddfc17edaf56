"""Runs packages on torch's tensors through the C interface, and converts torch's tensors to its handles and back.

An AtenTensorHandle has a single owner, and passing the handle on passes the ownership. Handles of libtorch are
torch's own tensors; on a CPU a tensor can also lie over the memory of another library's tensor.

`torch._inductor.aoti_load_package` imports Dynamo and Inductor, which takes longer than everything else of a start
together.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from snapcap.models.dataclass import dataclass
from snapcap.models.layers.weights import RegionFunction
from snapcap.models.regions.table import Region
from snapcap.warmup.artifacts.manifest import VerifiedFile
from snapcap.warmup.runtime.aoti.native import Libtorch, NativeTensor
from snapcap.warmup.runtime.aoti.packages import AotiError, Container, PackageError
from snapcap.warmup.runtime.model import AotBackend, Model

# torch's Python module hands handles over in capsules without a name.
_unpack = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_pack = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def run_on_tensors(container: Container, inputs: Sequence[Tensor], stream: int | None) -> Tensor:
    """Run a package on torch's tensors. Raises AotiError if it fails."""
    return tensor_of(container.run(handles_of(inputs), stream))


def tensor_of(handle: int) -> Tensor:
    """The tensor of a handle, which is gone afterwards."""
    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_pack(handle, None, None))


def handles_of(tensors: Sequence[Tensor]) -> list[int]:
    """A handle of each tensor, which belongs to the caller."""
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return [_unpack(capsule, None) for capsule in capsules]


def tensor_over(tensor: NativeTensor) -> Tensor:
    """torch's tensor over the memory of one of a CPU, which it keeps."""
    dtype = getattr(torch, tensor.spec[0])
    made = torch.from_numpy(tensor.array)
    return made if made.dtype == dtype else made.view(dtype)


def over_tensor(libtorch: Libtorch, tensor: Tensor) -> NativeTensor:
    """A tensor over the memory of one of torch's on the CPU, which it keeps."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    handle = libtorch.over(tensor.data_ptr(), dtype, tensor.shape, tensor.stride())
    return NativeTensor(libtorch, handle, owner=tensor)


@dataclass(frozen=True)
class TorchPackages:
    """Opens packages for tensors of a device."""

    device: torch.device

    def open(self, entry: str, package: VerifiedFile) -> RegionFunction:
        return open_package(package, self.device)

    def eager(self, region: Region) -> RegionFunction:
        return region.function


def torch_backend(
    entries: Mapping[str, VerifiedFile], input_specs: Mapping[str, Any], model: Model[Tensor]
) -> AotBackend[Tensor]:
    """The `aot` backend for a model of torch's tensors."""
    return AotBackend(entries, input_specs, model, TorchPackages(model.state.tokens.device))


def open_package(package: VerifiedFile, device: torch.device) -> RegionFunction:
    """The package's function, which takes what the region takes and returns its one tensor.

    The package is opened from verified bytes, or not at all. Nothing checks the inputs of a call: their shapes,
    strides and dtypes must be those that the package was compiled for. Raises PackageError if the file cannot be
    opened."""
    try:
        container = Container.open(package, str(device))
    except AotiError as error:
        raise PackageError(f"{package.path.name} cannot be opened: {error}") from error
    if device.type == "cpu":
        return lambda *inputs: run_on_tensors(container, inputs, None)
    index = device.index or 0
    # Not `torch.cuda.current_stream`, which makes an object of it.
    stream = torch._C._cuda_getCurrentRawStream
    return lambda *inputs: run_on_tensors(container, inputs, stream(index))
