"""Runs a build or check worker: reads its job, then does one region at one bucket for each line."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapcap.models.config import ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.processing.transform import ImageTransform
from snapcap.warmup.machine.tasks import Task, serve_tasks
from snapcap.warmup.plan.buckets import Bucket
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.runtime.aoti.packages import entry_name
from snapcap.warmup.runtime.devices.torch_settings import open_device
from snapcap.warmup.runtime.loaded_model import LoadedModel, load_model

# What is done with a region at a bucket: its package's path, and what else the task says -> members of the answer.
Work = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class BuildJob:
    """What a worker of a build is told first: the checkpoint, the plan, and the folder of the packages."""

    checkpoint: Path
    plan: Plan
    folder: Path


def serve_regions(work: Work) -> int:
    """A worker's whole life: the job, then one {"region": …, "size": …} a line, each answered with what ``work``
    returns and the name of the entry. Returns the exit status."""

    gc.disable()  # all that a compiler makes lives on: to look through it is a fifteenth of a build

    def start(job: BuildJob) -> Task:
        model = _load(job)
        regions = {region.name: region for region in model.regions}

        def answer(task: dict[str, Any]) -> dict[str, Any]:
            region, bucket = regions[task.pop("region")], Bucket(task.pop("size"))
            entry = entry_name(region.name, bucket.size)
            try:
                return {"entry": entry, **work(model, job.plan, region, bucket, job.folder / entry, **task)}
            finally:
                gc.collect()
                gc.freeze()

        return answer

    return serve_tasks(BuildJob, start)


def _load(job: BuildJob) -> LoadedModel:
    """The model on the device of the plan, in this process."""
    config = ModelConfig.from_folder(job.checkpoint)
    transform = ImageTransform.from_folder(job.checkpoint, config.vision.image_size, family=config.vision.family)
    device, dtype = open_device(job.plan)
    return load_model(job.checkpoint, config, transform, job.plan, device, dtype)
