"""Opens packages for torch's tensors, without any compiler.

`torch._inductor.aoti_load_package` imports Dynamo and Inductor, which takes longer than everything else of a start
together. So a CPU's packages are opened by the raw runner beneath it, and a GPU's, whose calls are replayed from a
graph, through the C interface.
"""

import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from snapcap.models.regions.functions import RegionFunction
from snapcap.models.regions.table import Region
from snapcap.warmup.errors import first_line
from snapcap.warmup.runtime.aoti.container import AotiError, Container
from snapcap.warmup.runtime.aoti.package_library import library_file
from snapcap.warmup.runtime.aoti.packages import PackageError
from snapcap.warmup.runtime.aoti.tensors import run_on_tensors
from snapcap.warmup.runtime.backends.aot import AotBackend
from snapcap.warmup.runtime.loaded_model import LoadedModel
from snapcap.warmup.store.blobs import VerifiedFile


@dataclass(frozen=True)
class TorchPackages:
    """``opened``: by entry, what has been opened before."""

    device: torch.device
    opened: Mapping[str, Container] = field(default_factory=dict)

    def open(self, entry: str, package: VerifiedFile) -> RegionFunction:
        container = self.opened.get(entry)
        return (
            open_package(package, self.device) if container is None else container_function(container, self.device)
        )

    def eager(self, region: Region) -> RegionFunction:
        return region.function


def torch_backend(
    entries: Mapping[str, VerifiedFile],
    input_specs: Mapping[str, Any],
    model: LoadedModel,
    opened: Mapping[str, Container] | None = None,
) -> AotBackend[Tensor]:
    """The `aot` backend for a model of torch's tensors."""
    return AotBackend(entries, input_specs, model, TorchPackages(model.device, opened or {}))


def open_package(package: VerifiedFile, device: torch.device) -> RegionFunction:
    """The package's function, which takes what the region takes and returns its one tensor.

    It is opened from the bytes that it was verified to have, or not at all. Nothing checks what it is called with:
    shapes, strides and dtypes must be those it was compiled for.

    Raises:
        PackageError: the file cannot be opened.
    """
    if device.type == "cuda":
        try:
            return container_function(Container.open(package, str(device)), device)
        except AotiError as error:
            raise PackageError(f"{package.path.name} cannot be opened: {error}") from error
    try:
        with library_file(io.BytesIO(package.read())) as name:
            run = torch._C._aoti.AOTIModelContainerRunnerCpu(name, 1).run
    except (RuntimeError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise PackageError(f"{package.path.name} cannot be opened: {first_line(error)}") from error

    def call(*inputs: Tensor) -> Tensor:
        outputs: list[Tensor] = run(list(inputs))
        return outputs[0]

    return call


def container_function(container: Container, device: torch.device) -> RegionFunction:
    """The function of a package that is open, which launches on the current stream of the device."""
    if device.type == "cpu":
        return lambda *inputs: run_on_tensors(container, inputs, None)
    index = device.index or 0
    # Not `torch.cuda.current_stream`, which makes an object of it.
    stream = torch._C._cuda_getCurrentRawStream
    return lambda *inputs: run_on_tensors(container, inputs, stream(index))
