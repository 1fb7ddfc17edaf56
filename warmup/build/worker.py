"""Runs a build or check worker: reads its job, then does one region at one bucket for each line."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from snapcap.models.config import ModelConfig
from snapcap.models.processing.transform import ImageTransform
from snapcap.models.regions.table import Region
from snapcap.warmup.machine.child import Task, serve_lines
from snapcap.warmup.plan.buckets import Bucket
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.runtime.aoti.packages import entry_name
from snapcap.warmup.runtime.device import open_device
from snapcap.warmup.runtime.loaded_model import LoadedModel, load_model

# What is done with a region at a bucket: its package's path -> members of the answer.
Work = Callable[[LoadedModel, Plan, Region, Bucket, Path], dict[str, Any]]


def job_of(checkpoint: Path, plan: Plan, folder: Path) -> dict[str, Any]:
    """The first line a worker is sent: the checkpoint, the plan, and the folder of the packages."""
    return {"checkpoint": str(checkpoint), "plan": asdict(plan), "folder": str(folder)}


def serve_regions(work: Work) -> int:
    """A worker's whole life: the job, then one {"region": …, "size": …} a line, each answered with what ``work``
    returns and the name of the entry. Returns the exit status."""

    def start(job: dict[str, Any]) -> Task:
        model, plan = _load(job)
        folder = Path(job["folder"])
        regions = {region.name: region for region in model.regions}

        def answer(task: dict[str, Any]) -> dict[str, Any]:
            region, bucket = regions[task["region"]], Bucket(task["size"])
            entry = entry_name(region.name, bucket.size)
            return {"entry": entry, **work(model, plan, region, bucket, folder / entry)}

        return answer

    return serve_lines(start)


def _load(job: dict[str, Any]) -> tuple[LoadedModel, Plan]:
    """The model on the device of the plan, in this process."""
    plan = Plan(**{**job["plan"], "buckets": tuple(job["plan"]["buckets"])})
    folder = Path(job["checkpoint"])
    config = ModelConfig.from_folder(folder)
    transform = ImageTransform.from_folder(folder, config.vision.image_size, family=config.vision.family)
    device, dtype = open_device(plan)
    return load_model(folder, config, transform, plan, device, dtype), plan
