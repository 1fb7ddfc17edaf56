"""Holds the weights of regions, whatever tensors they are. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic

from snapcap.models.memory.memory import B
from snapcap.models.regions.table import Region


@dataclass(frozen=True)
class Weights(Generic[B]):
    """For each region name, one tuple of tensors per layer, in ``Region.weight_names`` order."""

    sets: Mapping[str, tuple[tuple[B, ...], ...]]

    def of(self, region: Region) -> tuple[tuple[B, ...], ...]:
        return self.sets[region.name]
