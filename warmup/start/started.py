"""Holds what a start has made: what serves. No torch."""

from typing import TYPE_CHECKING, Any

from snapcap.models.dataclass import dataclass
from snapcap.warmup.plan.artifacts import Artifacts
from snapcap.warmup.plan.buckets import Bucket, BucketTable
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.weights.find import WeightsResult

if TYPE_CHECKING:
    from concurrent.futures import Future

    from snapcap.warmup.runtime.model import Model
    from snapcap.warmup.runtime.runner import Runner
    from snapcap.warmup.start.warmer import Warmer
    from snapcap.warmup.store.publish import Published


@dataclass(frozen=True)
class StartedModel:
    """Holds a model that is ready to serve.

    cold: the buckets that are not warm yet, which `--ready-when first` leaves for later.
    weights: the result of looking for prepared weights.
    publication: with the jit backend, the future result of publishing the graphs that it compiled.
    """

    checkpoint: Checkpoint
    plan: Plan
    model: "Model[Any]"
    runner: "Runner[Any]"
    warmer: "Warmer"
    artifacts: Artifacts | None
    cold: tuple[Bucket, ...]
    weights: WeightsResult
    publication: "Future[list[Published]] | None" = None

    @property
    def warm_table(self) -> BucketTable:
        """The buckets that may serve by now."""
        cold = {bucket.size for bucket in self.cold}
        return BucketTable.of(size for size in self.plan.buckets if size not in cold)

    @property
    def compiled(self) -> bool:
        """True if every bucket came from artifacts."""
        return self.artifacts is not None and self.artifacts.hit
