"""Opens packages that AOTInductor compiled ahead of time, without any compiler: the `aot` backend.

`torch._inductor.aoti_load_package` imports Dynamo and Inductor, which takes longer than everything else of a start
together. So a CPU's packages are opened by the raw runner beneath it, whose calls are the fastest there are; and a
GPU's, whose calls are replayed from a graph, through the C interface, which needs not even torch's Python module.
"""

import io
import logging
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from snapcap.models.regions.table import Region, RegionFunction
from snapcap.warmup.errors import first_line
from snapcap.warmup.plan.buckets import Bucket
from snapcap.warmup.runtime.aoti.container import AotiError, Container
from snapcap.warmup.runtime.aoti.package_library import library_file
from snapcap.warmup.runtime.aoti.packages import InputSpecError, check_inputs, entry_name
from snapcap.warmup.runtime.aoti.tensors import run_on_tensors
from snapcap.warmup.runtime.loaded_model import LoadedModel
from snapcap.warmup.store.blobs import VerifiedFile

_logger = logging.getLogger("snapcap.start")


class PackageError(RuntimeError):
    """A package that cannot be opened; one line that names it."""


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


@dataclass(frozen=True)
class AotBackend:
    """Opens the package of each region and bucket, after its inputs have been compared with the model's.

    ``entries``: entry name to verified file. ``input_specs``: entry name to ``packages.InputSpecs``.
    ``opened``: entry name to what has been opened before.
    """

    entries: Mapping[str, VerifiedFile]
    input_specs: Mapping[str, Any]
    model: LoadedModel
    opened: Mapping[str, Container] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "aot"

    def callable(self, region: Region, bucket: Bucket) -> RegionFunction:
        """What is called on demand is opened by its first call, and stays eager where it cannot be.

        Raises:
            PackageError: the set has no such package, or it cannot be opened.
            InputSpecError: it was built for other inputs.
        """
        entry = entry_name(region.name, bucket.size)
        if region.on_demand:
            return _OnDemand(region.function, entry, lambda: self._open(region, bucket, entry))
        return self._open(region, bucket, entry)

    def _open(self, region: Region, bucket: Bucket, entry: str) -> RegionFunction:
        package = self.entries.get(entry)
        if package is None:
            raise PackageError(f"the artifact set has no {entry}")
        check_inputs(entry, self.input_specs.get(entry), self.model.inputs(region, bucket))
        device, container = self.model.state.tokens.device, self.opened.get(entry)
        return open_package(package, device) if container is None else container_function(container, device)


class _OnDemand:
    """A package that its first call opens."""

    def __init__(self, eager: RegionFunction, entry: str, opened: Callable[[], RegionFunction]) -> None:
        self._eager = eager
        self._entry = entry
        self._opened = opened
        self._run: RegionFunction | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self._run is None:
            try:
                self._run = self._opened()
            except (PackageError, InputSpecError) as error:
                _logger.error(
                    "package stays eager", extra={"fields": {"package": self._entry, "error": str(error)}}
                )
                self._run = self._eager
        return self._run(*inputs)
