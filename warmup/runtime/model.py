"""Holds a model on a device, and provides callables for its regions at each bucket. Imports no torch.

The `eager` backend returns the region functions themselves, which need torch's module, but no compiler. The `aot`
backend runs packages that AOTInductor compiled ahead of time.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol

from snapcap.models.config import ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.memory.memory import B
from snapcap.models.regions.state import DecodeState
from snapcap.models.regions.table import Component, Region, RegionCall, Regions, Weights, region_inputs
from snapcap.models.weights.prepared import MappedWeights
from snapcap.warmup.artifacts.manifest import VerifiedFile
from snapcap.warmup.plan.plan import Bucket
from snapcap.warmup.runtime.aoti.packages import (
    Container,
    Containers,
    InputSpecError,
    InputSpecs,
    PackageError,
    check_inputs,
    entry_name,
)


@dataclass(frozen=True)
class Model(Generic[B]):
    """Holds the regions, the weights and one set of static buffers.

    ``prepared``: the weights are prepared weights."""

    config: ModelConfig
    regions: Regions
    weights: Weights[B]
    state: DecodeState[B]
    prepared: bool = False

    def inputs(self, region: Region, bucket: Bucket) -> tuple[B, ...]:
        """Returns all inputs of a region at a bucket, with the weights of its first layer."""
        return (*region_inputs(region, self.config, self.state, bucket.size), *self.weights.of(region)[0])

    def input_specs(self, region: Region, bucket: Bucket) -> InputSpecs:
        """Returns the dtype, shape and strides of each input of a region at a bucket, as JSON."""
        specs = map(self.state.memory.spec, self.inputs(region, bucket))
        return [[dtype, list(shape), list(strides)] for dtype, shape, strides in specs]


def check_weights(mapped: MappedWeights, regions: Regions) -> None:
    """Check that prepared weights have the regions and layers of the configuration, and that all layers of a region
    are alike, because one package serves them. The number and shapes of the first layer's weights are compared with
    the package's later. Raises ValueError if a check fails."""
    wanted = {region.weights_name: region.layers for region in regions}
    if {name: len(layers) for name, layers in mapped.header.regions.items()} != wanted:
        raise ValueError("they have other regions or layers than the configuration implies")
    for name, layers in mapped.header.regions.items():
        tensors = [[mapped.header.tensors[tensor] for tensor in layer] for layer in layers]
        kinds = [[(each.dtype, each.shape, each.strides) for each in layer] for layer in tensors]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(f"the layers of {name} are not alike")


class Backend(Protocol):
    """Provides the callable that runs a region at a bucket's padded size."""

    @property
    def name(self) -> str: ...

    def callable(self, region: Region, bucket: Bucket) -> RegionCall:
        """Returns a function of (activations, caches, weights) that returns the region's output tensor."""


class EagerBackend:
    """Runs every region as its plain function."""

    name = "eager"

    def callable(self, region: Region, bucket: Bucket) -> RegionCall:
        return region.function


_logger = logging.getLogger("snapcap.start")


@dataclass(frozen=True)
class AotBackend(Generic[B]):
    """Opens the package of each region and bucket, after a comparison of its input specs with the model's.

    entries: verified files by entry name. input_specs: ``packages.InputSpecs`` by entry name.
    function_of: returns the function of an open package, for the model's kind of tensors.
    eager: returns a region's own function, for use if a package cannot be opened at its first call."""

    entries: Mapping[str, VerifiedFile]
    input_specs: Mapping[str, Any]
    model: Model[B]
    containers: Containers
    function_of: Callable[[Container], RegionCall]
    eager: Callable[[Region], RegionCall]
    name = "aot"

    def prepare(self, component: Component, bucket: Bucket) -> None:
        """Opens the packages that every encode or decode step of a bucket needs, on any thread: ``callable`` then
        takes no time. An error is raised there."""
        for region in self.model.regions.of(component):
            entry = entry_name(region.name, bucket.size)
            if entry in self.entries:
                self.containers.prepare(entry, self.entries[entry])

    def callable(self, region: Region, bucket: Bucket) -> RegionCall:
        """Returns the callable of a region's package. The first call opens the package of a region that is called
        on demand; such a region stays eager if the package cannot be opened. Raises PackageError if the set lacks
        the package, or the package cannot be opened, and InputSpecError if the package was built for other
        inputs."""
        if not region.on_demand:
            return self._open(region, bucket)
        run: RegionCall | None = None

        def opened_on_demand(*inputs: Any) -> Any:
            nonlocal run
            if run is None:
                try:
                    run = self._open(region, bucket)
                except (PackageError, InputSpecError) as error:
                    fields = {"package": entry_name(region.name, bucket.size), "error": str(error)}
                    _logger.error("package stays eager", extra={"fields": fields})
                    run = self.eager(region)
            return run(*inputs)

        return opened_on_demand

    def _open(self, region: Region, bucket: Bucket) -> RegionCall:
        entry = entry_name(region.name, bucket.size)
        package = self.entries.get(entry)
        if package is None:
            raise PackageError(f"the artifact set has no {entry}")
        check_inputs(entry, self.input_specs.get(entry), self.model.input_specs(region, bucket))
        return self.function_of(self.containers.open(entry, package))
