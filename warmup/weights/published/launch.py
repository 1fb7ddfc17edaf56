"""Launches the process that brings a published model, before there is anything to tell it.

The imports of that process take longer than a start takes to find out which model it wants. So the process is
launched first, and this module imports little.
"""

from typing import TYPE_CHECKING

from snapcap.warmup.machine.worker import Worker
from snapcap.warmup.options import StartOptions

if TYPE_CHECKING:
    from snapcap.warmup.weights.published.worker import ModelJob


def fetcher_worker(options: StartOptions) -> Worker:
    """The worker of ``published.worker``, whose process is not there yet."""
    return Worker("snapcap.warmup.weights.published.worker", lambda: _job(options))


def _job(options: StartOptions) -> "ModelJob":
    from snapcap.warmup.store.worker import StoreJob  # noqa: PLC0415  while the process imports
    from snapcap.warmup.weights.published.worker import ModelJob  # noqa: PLC0415  likewise

    job = StoreJob.of(options, "", {})
    return ModelJob(job.store, job.s3, job.folder.absolute(), options.model.source)
