"""Loads cuBLAS on a thread beside the rest of a start, as the first product takes a tenth of a second."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator

from snapcap.warmup.runtime.aoti.container import AotiError
from snapcap.warmup.runtime.aoti.cuda_runtime import CudaError, CudaRuntime
from snapcap.warmup.runtime.aoti.libtorch import Libtorch
from snapcap.warmup.runtime.aoti.native_tensors import NativeTensor

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
