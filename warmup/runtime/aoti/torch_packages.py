"""Opens packages for torch's tensors, through the C interface and without any compiler.

`torch._inductor.aoti_load_package` imports Dynamo and Inductor, which takes longer than everything else of a start
together.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from snapcap.models.dataclass import dataclass
from snapcap.models.regions.functions import RegionFunction
from snapcap.models.regions.table import Region
from snapcap.warmup.runtime.aoti.container import AotiError, Container
from snapcap.warmup.runtime.aoti.packages import PackageError
from snapcap.warmup.runtime.aoti.tensors import run_on_tensors
from snapcap.warmup.runtime.backends.aot import AotBackend
from snapcap.warmup.runtime.model import Model
from snapcap.warmup.store.blobs import VerifiedFile


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
    strides and dtypes must be those that the package was compiled for.

    Raises:
        PackageError: the file cannot be opened.
    """
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
