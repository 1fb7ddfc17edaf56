"""Returns the region functions themselves: the `eager` backend, always there, which needs no compiler."""

from snapcap.models.regions.table import Region, RegionFunction
from snapcap.warmup.plan.buckets import Bucket


class EagerBackend:
    """Every region and bucket is the plain function."""

    name = "eager"

    def callable(self, region: Region, bucket: Bucket) -> RegionFunction:
        return region.function
