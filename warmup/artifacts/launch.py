"""Launches the process that moves artifacts, before there is anything to tell it.

The imports of that process take longer than a start takes to find out which model it wants. So the process is
launched first, and this module imports little.
"""

from typing import TYPE_CHECKING

from snapcap.warmup.machine.worker import Worker
from snapcap.warmup.options import StartOptions

if TYPE_CHECKING:
    from snapcap.warmup.artifacts.worker import FetchJob

_MODULE = "snapcap.warmup.artifacts.worker"


def fetch_worker(options: StartOptions, *, model: bool = False, signs: bool = False) -> Worker:
    """The worker of ``artifacts.worker``, whose process is not there yet.

    Args:
        model: whether the model is fetched too, and not only its packages.
        signs: whether the worker publishes, and so may have the key that signs.
    """
    return Worker(_MODULE, lambda: _job(options, model=model, signs=signs))


def _job(options: StartOptions, *, model: bool, signs: bool) -> "FetchJob":
    from snapcap.warmup.artifacts.worker import FetchJob  # noqa: PLC0415  while the process imports

    return FetchJob.of(options, model=model, signs=signs)
