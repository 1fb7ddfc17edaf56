"""Defines the protocol of a backend: it turns a region at a bucket into a callable with the region's arguments."""

from typing import Protocol

from snapcap.models.regions.table import Region, RegionCall
from snapcap.warmup.plan.buckets import Bucket


class Backend(Protocol):
    """Hands out the callable that runs a region at a bucket's padded size."""

    @property
    def name(self) -> str: ...

    def callable(self, region: Region, bucket: Bucket) -> RegionCall:
        """A function of (activations, caches, weights) that returns the region's one tensor."""
        ...
