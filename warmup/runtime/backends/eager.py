"""Returns the region functions themselves: the `eager` backend, which needs torch's module and no compiler."""

from snapcap.models.regions.table import Region, RegionCall
from snapcap.warmup.plan.buckets import Bucket


class EagerBackend:
    """Every region and bucket is the plain function."""

    name = "eager"

    def callable(self, region: Region, bucket: Bucket) -> RegionCall:
        return region.function
