"""Runs a build or check worker: reads its job, then does one region at one bucket for each line.

A worker knows the shapes of all inputs and holds none of them: it reads no weights until it checks a package, and
takes device memory for one package at a time.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.layers.weights import Normalisation
from snapcap.models.memory.memory import Spec
from snapcap.models.processing.transform import ImageTransform
from snapcap.models.regions.table import Region, Weights
from snapcap.models.weights.load import load_weights
from snapcap.warmup.machine.worker import Task, serve_tasks
from snapcap.warmup.plan.buckets import Bucket
from snapcap.warmup.plan.memory import MemoryPlan
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.runtime.aoti.packages import entry_name
from snapcap.warmup.runtime.model import Model
from snapcap.warmup.runtime.torch_model import DTYPES, open_device


@dataclass(frozen=True)
class BuildJob:
    """Holds the first message to a build's worker: the checkpoint, the plan, and the folder of the packages."""

    checkpoint: Path
    plan: Plan
    folder: Path


@dataclass(frozen=True)
class Workbench:
    """Holds a worker's job, the described model, and the device that packages are built for."""

    job: BuildJob
    model: Model[Spec]
    device: torch.device
    dtype: torch.dtype

    def host_weights(self) -> Weights[Tensor]:
        """The checkpoint's weights in this computer's memory, laid out for the device.

        Raises:
            WeightsError: they cannot be read.
        """
        return _weights(self.job, self.model.config, torch.device("cpu"))


# Compiles or checks a region at a bucket: (path of the package, other members of the task) -> members of the
# answer.
Work = Callable[..., dict[str, Any]]


def serve_regions(work: Work) -> int:
    """Serve a worker's whole life: the job, then one {"region": …, "size": …} a line. Each is answered with what
    ``work`` returns and the name of the entry. Returns the exit status."""

    gc.disable()  # all that a compiler makes lives on: to look through it is a fifteenth of a build

    def start(job: BuildJob) -> Task:
        bench = open_workbench(job)
        regions: dict[str, Region] = {region.name: region for region in bench.model.regions}

        def answer(task: dict[str, Any]) -> dict[str, Any]:
            region, bucket = regions[task.pop("region")], Bucket(task.pop("size"))
            entry = entry_name(region.name, bucket.size)
            try:
                return {"entry": entry, **work(bench, region, bucket, job.folder / entry, **task)}
            finally:
                gc.collect()
                gc.freeze()
                if bench.device.type == "cuda":
                    torch.cuda.empty_cache()  # the other workers of the build share the card

        return answer

    return serve_tasks(BuildJob, start)


def open_workbench(job: BuildJob) -> Workbench:
    """Set up torch in this process and describe the model, without reading a weight."""
    config, plan = ModelConfig.from_folder(job.checkpoint), job.plan
    device, dtype = open_device(plan)
    described = MemoryPlan(config, plan)
    weights = _weights(job, config, torch.device("meta"))
    specs = {
        name: tuple(tuple(_spec(tensor) for tensor in layer) for layer in layers)
        for name, layers in weights.sets.items()
    }
    return Workbench(job, Model(config, described.regions, Weights(specs), described.state), device, dtype)


def _weights(job: BuildJob, config: ModelConfig, place: torch.device) -> Weights[Tensor]:
    transform = ImageTransform.from_folder(job.checkpoint, config.vision.image_size, family=config.vision.family)
    pixels = Normalisation(transform.effective_rescale, transform.effective_mean, transform.effective_std)
    dtype = DTYPES[job.plan.dtype]
    return load_weights(job.checkpoint, config, pixels, place, dtype, layout=job.plan.device_type)


def _spec(tensor: Tensor) -> Spec:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride()


def empty(spec: Spec, device: torch.device) -> Tensor:
    """A tensor as described, of whatever the memory holds."""
    dtype, shape, strides = spec
    return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device)
