"""AOTInductor's packages through their C interface: opened and run without torch's Python module.

torch's own loader is part of that module, so it has to wait until torch is imported, and it holds Python's lock
while it works. Here a package is mapped, and run, while another thread imports torch.

The names are those of torch/csrc/inductor/aoti_runtime/interface.h, which a package exports, and of
torch/csrc/inductor/aoti_torch/c/shim.h, which libtorch exports to packages. Both are kept stable, as packages of
earlier versions of torch have to work.
"""

import ctypes
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from warmup.dynamic_library import open_library
from warmup.packages import MODEL_NAME

_MODELS = f"/data/aotinductor/{MODEL_NAME}/"
_METADATA = "_metadata.json"


class AotiError(RuntimeError):
    """A package that cannot be opened or run; one line."""


@dataclass(frozen=True)
class Container:
    """A package that is mapped and has a model made of it. It stays until the process ends.

    Only one thread at a time may run it; runs of others go on beside it, as it holds no lock of Python's.
    """

    library: ctypes.CDLL
    handle: ctypes.c_void_p

    @classmethod
    def open(cls, package: Path, device: str) -> "Container":
        """Map the library of a package, and make its model on a device, as ``cuda:0``.

        Raises:
            AotiError: the file is no package, or is one that needs more than this interface.
        """
        try:
            library = _map(package)
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

        ``inputs``: AtenTensorHandles in the order of the package's signature, which are gone when this returns.
        Returns the AtenTensorHandle of its one output, which belongs to the caller.

        Raises:
            AotiError: an operator failed; its message is on the standard error of the process.
        """
        given = (ctypes.c_void_p * len(inputs))(*inputs)
        output = ctypes.c_void_p()
        # Single-threaded: a variant with locks and events of its own breaks the capture of a CUDA graph.
        status = self.library.AOTInductorModelContainerRunSingleThreaded(
            self.handle,
            given,
            ctypes.c_size_t(len(inputs)),
            ctypes.byref(output),
            ctypes.c_size_t(1),
            ctypes.c_void_p(stream),
            None,
        )
        if status != 0 or output.value is None:
            raise AotiError("it failed while it ran")
        return output.value


def _map(package: Path) -> ctypes.CDLL:
    with zipfile.ZipFile(package) as members:
        names = [name for name in members.namelist() if _MODELS in name]
        libraries = [name for name in names if name.endswith(".so")]
        if len(libraries) != 1:
            raise OSError(f"{package.name} holds {len(libraries)} libraries, not one")
        if any(name.endswith(".json") and not name.endswith(_METADATA) for name in names):
            # Operators that have no C function, which only a ProxyExecutor can call.
            raise OSError(f"{package.name} calls operators of Python's dispatcher")
        content = members.read(libraries[0])
    # A library once mapped needs its file no more.
    with tempfile.NamedTemporaryFile(prefix="snapcap-", suffix=".so") as file:
        file.write(content)
        file.flush()
        return ctypes.CDLL(file.name, handle=open_library(file.name))
