"""Converts torch's tensors to the handles of AOTInductor's C interface, and back.

An AtenTensorHandle has a single owner, and passing the handle on passes the ownership. Handles of libtorch are
torch's own tensors; on a CPU a tensor can also lie over the memory of another library's tensor.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from snapcap.warmup.runtime.aoti.container import Container
from snapcap.warmup.runtime.aoti.libtorch import Libtorch
from snapcap.warmup.runtime.aoti.native_tensors import NativeTensor

if TYPE_CHECKING:
    from torch import Tensor

# torch's Python module hands handles over in capsules without a name.
_unpack = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_pack = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def run_on_tensors(container: Container, inputs: "Sequence[Tensor]", stream: int | None) -> "Tensor":
    """Run a package on torch's tensors; torch has been imported.

    Raises:
        AotiError: it fails.
    """
    import torch  # noqa: PLC0415  this module is used before torch is imported

    convert = torch._C._aoti
    handles = [_unpack(capsule, None) for capsule in convert.unsafe_alloc_void_ptrs_from_tensors(list(inputs))]
    return tensor_of(container.run(handles, stream))


def tensor_of(handle: int) -> "Tensor":
    """The tensor of a handle, which is gone afterwards. Imports torch."""
    import torch  # noqa: PLC0415

    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_pack(handle, None, None))


def handle_of(tensor: "Tensor") -> int:
    """A handle of a tensor, which belongs to the caller. Imports torch."""
    import torch  # noqa: PLC0415

    (capsule,) = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([tensor])
    handle: int = _unpack(capsule, None)
    return handle


def tensor_over(tensor: NativeTensor) -> "Tensor":
    """torch's tensor over the memory of one of a CPU, which it keeps. Imports torch."""
    import torch  # noqa: PLC0415

    dtype = getattr(torch, tensor.spec[0])
    made = torch.from_numpy(tensor.array)
    return made if made.dtype == dtype else made.view(dtype)


def over_tensor(libtorch: Libtorch, tensor: "Tensor") -> NativeTensor:
    """A tensor over the memory of one of torch's on the CPU, which it keeps."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    handle = libtorch.over(tensor.data_ptr(), dtype, tensor.shape, tensor.stride())
    return NativeTensor(libtorch, handle, owner=tensor)
