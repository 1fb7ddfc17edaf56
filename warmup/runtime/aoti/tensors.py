"""Makes tensors for AOTInductor's C interface without torch's Python module, or takes them from it.

An AtenTensorHandle belongs to whoever has it: to the one that it is given to, once it is given away.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snapcap.warmup.runtime.aoti.container import AotiError, Container
from snapcap.warmup.runtime.aoti.packages import InputSpecs

if TYPE_CHECKING:
    from torch import Tensor

# torch's Python module hands handles over in capsules without a name.
_unpack = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_pack = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


@dataclass(frozen=True)
class Zeros:
    """Makes tensors of zeros on one device, with the functions that libtorch exports to packages."""

    libtorch: ctypes.CDLL
    device: str  # "cpu", or "cuda"
    index: int

    @classmethod
    def on(cls, libtorch: int, device: str) -> "Zeros":
        """``libtorch``: the handle of the library; ``device``: "cpu", or as "cuda:0".

        Initialises the device; other threads run Python meanwhile.

        Raises:
            AotiError: the device cannot be used.
        """
        kind, _, index = device.partition(":")
        unlocked = cls(ctypes.CDLL(None, handle=libtorch), kind, int(index or 0))
        unlocked.drop(unlocked.make("uint8", [1], [1]))
        # The rest takes microseconds. To give Python's lock up for them would take up to 5 ms each time, until the
        # thread that imports gives it back.
        return cls(ctypes.PyDLL(None, handle=libtorch), kind, int(index or 0))

    def make(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> int:
        """The handle of a tensor.

        Raises:
            AotiError: there is no memory for it, or no such dtype.
        """
        lengths, tensor = ctypes.c_int64 * len(shape), ctypes.c_void_p()
        self._call(
            "aoti_torch_empty_strided",
            ctypes.c_int64(len(shape)),
            lengths(*shape),
            lengths(*strides),
            exported(self.libtorch, f"aoti_torch_dtype_{dtype}")(),
            exported(self.libtorch, f"aoti_torch_device_type_{self.device}")(),
            self.index,
            ctypes.byref(tensor),
        )
        self._call("aoti_torch_zero_", tensor)
        return tensor.value or 0

    def drop(self, tensor: int) -> None:
        """Free a tensor."""
        self._call("aoti_torch_delete_tensor_object", ctypes.c_void_p(tensor))

    def _call(self, name: str, *arguments: Any) -> None:
        if exported(self.libtorch, name)(*arguments) != 0:
            raise AotiError(f"{name} failed")


def exported(library: ctypes.CDLL, name: str) -> Any:
    """A function of libtorch's.

    Raises:
        AotiError: this version has none of that name.
    """
    try:
        return getattr(library, name)
    except AttributeError as error:
        raise AotiError(f"libtorch has no {name}") from error


def run_on_zeros(container: Container, specs: InputSpecs, zeros: Zeros) -> None:
    """Run a package once on zeros of what it was built for; nobody reads what comes of it.

    Raises:
        AotiError: it fails.
    """
    inputs = [zeros.make(*each) for each in specs]
    zeros.drop(container.run(inputs, None))


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
