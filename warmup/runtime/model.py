"""Holds a model that is on a device, and turns its regions at a bucket into callables. No torch.

The `eager` backend returns the region functions themselves, which need torch's module and no compiler. The `aot`
backend runs packages that AOTInductor compiled ahead of time.
"""

import logging
from collections.abc import Mapping
from typing import Any, Generic, Protocol

from snapcap.models.config import ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.memory.memory import B
from snapcap.models.regions.state import DecodeState
from snapcap.models.regions.table import Region, RegionCall, Regions, Weights, region_inputs
from snapcap.models.weights.prepared import MappedWeights
from snapcap.warmup.artifacts.manifest import VerifiedFile
from snapcap.warmup.plan.plan import Bucket
from snapcap.warmup.runtime.aoti.packages import InputSpecError, InputSpecs, PackageError, check_inputs, entry_name


@dataclass(frozen=True)
class Model(Generic[B]):
    """Regions, weights and one set of static buffers.

    ``prepared``: whether the weights are prepared ones.
    """

    config: ModelConfig
    regions: Regions
    weights: Weights[B]
    state: DecodeState[B]
    prepared: bool = False

    def inputs(self, region: Region, bucket: Bucket) -> tuple[B, ...]:
        """Everything the region takes at a bucket, with the weights of its first layer."""
        return (*region_inputs(region, self.config, self.state, bucket.size), *self.weights.of(region)[0])

    def input_specs(self, region: Region, bucket: Bucket) -> InputSpecs:
        """Dtype, shape and strides of each of these, as JSON."""
        specs = map(self.state.memory.spec, self.inputs(region, bucket))
        return [[dtype, list(shape), list(strides)] for dtype, shape, strides in specs]


def check_weights(mapped: MappedWeights, regions: Regions) -> None:
    """Compare what prepared weights hold with what the regions of a configuration take. All layers of a region are
    alike, as one package serves them: the first one's number and shapes are compared with the package's later on.
    Raises ValueError if they differ."""
    wanted = {region.weights_name: region.layers for region in regions}
    if {name: len(layers) for name, layers in mapped.header.regions.items()} != wanted:
        raise ValueError("they have other regions or layers than the configuration implies")
    for name, layers in mapped.header.regions.items():
        tensors = [[mapped.header.tensors[tensor] for tensor in layer] for layer in layers]
        kinds = [[(each.dtype, each.shape, each.strides) for each in layer] for layer in tensors]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(f"the layers of {name} are not alike")


class Backend(Protocol):
    """Hands out the callable that runs a region at a bucket's padded size."""

    @property
    def name(self) -> str: ...

    def callable(self, region: Region, bucket: Bucket) -> RegionCall:
        """A function of (activations, caches, weights) that returns the region's one tensor."""
        ...


class EagerBackend:
    """Every region and bucket is the plain function."""

    name = "eager"

    def callable(self, region: Region, bucket: Bucket) -> RegionCall:
        return region.function


_logger = logging.getLogger("snapcap.start")


class Packages(Protocol):
    """Opens packages for one kind of tensors."""

    def open(self, entry: str, package: VerifiedFile) -> RegionCall:
        """The package's function. Raises PackageError if the file cannot be opened."""
        ...

    def eager(self, region: Region) -> RegionCall:
        """The region's own function, for a package that cannot be opened when it is first called."""
        ...


@dataclass(frozen=True)
class AotBackend(Generic[B]):
    """Opens the package of each region and bucket, after its inputs have been compared with the model's.

    ``entries``: entry name to verified file. ``input_specs``: entry name to ``packages.InputSpecs``.
    """

    entries: Mapping[str, VerifiedFile]
    input_specs: Mapping[str, Any]
    model: Model[B]
    packages: Packages
    name = "aot"

    def callable(self, region: Region, bucket: Bucket) -> RegionCall:
        """Returns the callable of a region's package. The first call opens the package of a region that is called
        on demand; such a region stays eager if the package cannot be opened.

        Raises:
            PackageError: the set has no such package, or it cannot be opened.
            InputSpecError: it was built for other inputs.
        """
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
                    run = self.packages.eager(region)
            return run(*inputs)

        return opened_on_demand

    def _open(self, region: Region, bucket: Bucket) -> RegionCall:
        entry = entry_name(region.name, bucket.size)
        package = self.entries.get(entry)
        if package is None:
            raise PackageError(f"the artifact set has no {entry}")
        check_inputs(entry, self.input_specs.get(entry), self.model.input_specs(region, bucket))
        return self.packages.open(entry, package)
