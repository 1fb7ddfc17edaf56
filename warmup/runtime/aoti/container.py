"""Opens and runs AOTInductor's packages through their C interface, without torch's Python module.

torch's own loader is part of that module.

The names are those of torch/csrc/inductor/aoti_runtime/interface.h, which a package exports, and of
torch/csrc/inductor/aoti_torch/c/shim.h, which libtorch exports to packages. Both are kept stable, as packages of
earlier versions of torch have to work.
"""

import ctypes
import io
import zipfile
import zlib
from collections.abc import Sequence

from snapcap.models.dataclass import dataclass
from snapcap.warmup.machine.dynamic_library import open_library
from snapcap.warmup.runtime.aoti.package_library import library_file, package_content
from snapcap.warmup.store.blobs import VerifiedFile


class AotiError(RuntimeError):
    """A package that cannot be opened or run; one line."""


class CaptureError(AotiError):
    """Recording launches was broken off; the device is of no more use to this process."""


@dataclass(frozen=True)
class Container:
    """A loaded package: its library is mapped and its model is made. Both stay until the process ends.

    Only one thread at a time may run a container. Runs of other containers go on in parallel: Python's lock is
    free.
    """

    library: ctypes.CDLL
    handle: ctypes.c_void_p

    @classmethod
    def open(cls, package: VerifiedFile, device: str, standalone: bool = False) -> "Container":
        """Map the library of a package, and make its model on a device, as ``cuda:0``.

        Args:
            standalone: on the CPU library, which has been opened, and not on libtorch.

        Raises:
            AotiError: the file has changed since it was verified, is no package, or needs more than this interface.
        """
        try:
            with library_file(package_content(io.BytesIO(package.read()), standalone)) as name:
                library = ctypes.CDLL(name, handle=open_library(name))
            create = library.AOTInductorModelContainerCreateWithDevice
            _ = library.AOTInductorModelContainerRunSingleThreaded  # missed now, not by a run
        except (OSError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            raise AotiError(str(error)) from error
        handle = ctypes.c_void_p()
        status = create(ctypes.byref(handle), ctypes.c_size_t(1), device.encode(), None)
        if status != 0:
            raise AotiError(f"its model cannot be made on {device}")
        return cls(library, handle)

    def run(self, inputs: Sequence[int], stream: int | None) -> int:
        """Run the model on a CUDA stream (None: the default one).

        ``inputs``: AtenTensorHandles in the order of the package's inputs, which are gone when this returns.
        Returns the AtenTensorHandle of its one output, which belongs to the caller.

        Raises:
            AotiError: an operator failed; its message is on the standard error of the process.
        """
        return self.run_given((ctypes.c_void_p * len(inputs))(*inputs), stream)

    def run_given(self, given: "ctypes.Array[ctypes.c_void_p]", stream: int | None) -> int:
        """Runs the package as ``run`` does, with the handles in an array, which the caller may reuse."""
        output = ctypes.c_void_p()
        # Single-threaded: a variant with locks and events of its own breaks the capture of a CUDA graph.
        status = self.library.AOTInductorModelContainerRunSingleThreaded(
            self.handle,
            given,
            ctypes.c_size_t(len(given)),
            ctypes.byref(output),
            ctypes.c_size_t(1),
            ctypes.c_void_p(stream),
            None,
        )
        if status != 0 or output.value is None:
            raise AotiError("it failed while it ran")
        return output.value
