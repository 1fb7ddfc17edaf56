"""Holds a model that is on a device: regions, weights and buffers, whatever tensors they are. No torch."""

from typing import Generic

from snapcap.models.config import ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.memory.memory import B
from snapcap.models.regions.state import DecodeState
from snapcap.models.regions.table import Region, Regions, Weights, region_inputs
from snapcap.models.weights.prepared import MappedWeights
from snapcap.warmup.plan.buckets import Bucket
from snapcap.warmup.runtime.aoti.packages import InputSpecs


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

    Raises:
        ValueError: they differ.
    """
    wanted = {region.name: region.layers for region in regions}
    if {name: len(layers) for name, layers in mapped.header.regions.items()} != wanted:
        raise ValueError("they have other regions or layers than the configuration implies")
    for name, layers in mapped.header.regions.items():
        tensors = [[mapped.header.tensors[tensor] for tensor in layer] for layer in layers]
        kinds = [[(each.dtype, each.shape, each.strides) for each in layer] for layer in tensors]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(f"the layers of {name} are not alike")
