"""Runs operators of libtorch on zeros, without torch's Python module.

Two ways lead there, both of which torch keeps stable. The dispatcher, for operators that take tensors, numbers and
nothing: torch/csrc/inductor/aoti_torch/c/shim.h. And where one takes a Scalar or a list, the function that
AOTInductor's packages call: torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snapcap.warmup.runtime.aoti.container import AotiError
from snapcap.warmup.runtime.aoti.eager_launches import Launch
from snapcap.warmup.runtime.aoti.tensors import Zeros, exported

_NONE, _NO, _LAST, _EPS = 0, 0, -1, 1e-5
# What follows the tensors of a launch.
_ARGUMENTS: dict[str, tuple[int | float, ...]] = {
    "_softmax": (_LAST, _NO),
    "argmax": (_NONE, _NO),
    "bmm": (),
    "copy_": (_NO,),
    "div.Tensor": (),
    "embedding": (_LAST, _NO, _NO),
    "gt.Tensor": (),
    "mm": (),
    "mul.Tensor": (),
}
_STACK = 8  # no call here takes or gives more
_FLASH_RESULTS = 9


@dataclass(frozen=True)
class Operators:
    """Runs operators on zeros; nobody reads what comes of it.

    ``libtorch`` is called without Python's lock: other threads run Python meanwhile.
    """

    libtorch: ctypes.CDLL
    zeros: Zeros

    def run(self, launch: Launch) -> None:
        """Run an operator on fresh zeros.

        Raises:
            AotiError: libtorch has no such function, or it fails; its message is on the standard error.
        """
        inputs = [self.zeros.make(*like) for like in launch.tensors]
        match launch.operator:
            case "addmm":
                _, left, right = launch.tensors
                product = self.zeros.make(left.dtype, (left.shape[0], right.shape[1]), (right.shape[1], 1))
                one = ctypes.c_double(1)
                self._call("addmm_out", [product, *inputs], one, one)
            case "sub.Tensor":  # for torch too a sum with a factor
                self._call("add_Tensor", inputs, ctypes.c_double(-1), results=1)
            case "_scaled_dot_product_flash_attention" as name:
                self._call(name, inputs, ctypes.c_double(0), _NO, _NO, None, results=_FLASH_RESULTS)
            case "_scaled_dot_product_efficient_attention" as name:
                self._call(name, inputs, None, _NO, ctypes.c_double(0), _NO, None, results=4)
            case "native_layer_norm":
                lengths = self._list(launch.tensors[0].shape[-1])
                self._dispatch(launch.operator, *inputs, lengths, _NONE, _NONE, _EPS, results=3)
            case "scatter_.src":
                values, at, sources = inputs
                self._dispatch(launch.operator, values, 2, at, sources)
            case operator:
                self._dispatch(operator, *inputs, *_ARGUMENTS[operator])

    def _call(self, name: str, inputs: Sequence[int], *others: Any, results: int = 0) -> None:
        """Call a C function, which leaves its inputs to the caller."""
        made = (ctypes.c_void_p * results)()
        places = [ctypes.byref(made, place * ctypes.sizeof(ctypes.c_void_p)) for place in range(results)]
        try:
            function = exported(self.libtorch, f"aoti_torch_{self.zeros.device}_{name}")
            failed = function(*map(ctypes.c_void_p, inputs), *others, *places)
        finally:
            # Of flash attention's results two are lengths.
            tensors = (each for place, each in enumerate(made) if results != _FLASH_RESULTS or place not in (4, 5))
            for tensor in (*inputs, *filter(None, tensors)):
                self.zeros.drop(tensor)
        if failed:
            raise AotiError(f"{name} failed")

    def _dispatch(self, operator: str, *arguments: int | float, results: int = 1) -> None:
        """Call the dispatcher, which takes the tensors that it is given; those that it returns are the caller's."""
        function = exported(self.libtorch, "aoti_torch_call_dispatcher")
        name, _, overload = operator.partition(".")
        stack = (ctypes.c_uint64 * _STACK)(*map(_stable_value, arguments))
        if function(f"aten::{name}".encode(), overload.encode(), stack) != 0:
            raise AotiError(f"{operator} failed")
        for tensor in stack[:results]:
            self.zeros.drop(tensor)

    def _list(self, value: int) -> int:
        """A list of one integer, which the dispatcher takes."""
        made = ctypes.c_void_p()
        exported(self.libtorch, "torch_new_list_reserve_size")(ctypes.c_size_t(1), ctypes.byref(made))
        exported(self.libtorch, "torch_list_push_back")(made, ctypes.c_uint64(value))
        return made.value or 0


def _stable_value(argument: int | float) -> int:
    """An argument as a StableIValue: its 8 bytes, whatever they mean."""
    kind = "d" if isinstance(argument, float) else "q"
    value: int = struct.unpack("Q", struct.pack(kind, argument))[0]
    return value
