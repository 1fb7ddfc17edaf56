"""Holds the weights of regions, for every kind of tensor. Imports no torch."""

from collections.abc import Mapping
from typing import Generic

from snapcap.models.dataclass import dataclass
from snapcap.models.memory.memory import B
from snapcap.models.regions.table import Region


@dataclass(frozen=True)
class Weights(Generic[B]):
    """For each region name, one tuple of tensors per layer, in ``Region.weight_names`` order."""

    sets: Mapping[str, tuple[tuple[B, ...], ...]]

    @classmethod
    def of_names(cls, regions: Mapping[str, tuple[tuple[str, ...], ...]], tensors: Mapping[str, B]) -> "Weights[B]":
        """Returns weights from tensors by name. ``regions`` holds the names for each region and layer."""
        return cls(
            {
                region: tuple(tuple(tensors[name] for name in layer) for layer in layers)
                for region, layers in regions.items()
            }
        )

    def of(self, region: Region) -> tuple[tuple[B, ...], ...]:
        return self.sets[region.name]
