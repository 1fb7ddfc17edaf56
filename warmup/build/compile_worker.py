"""Compiles regions in a worker process: exports and compiles one region at one bucket for each input line.

    stdin   {"checkpoint": folder, "plan": {…}, "folder": where packages go}, then {"region": …, "size": …} a line
    stdout  {"entry": …, "inputs": […], "seconds": …} or {"error": …} a line

A compiler and a checker (`check_worker`) share the workbench, which knows the shapes of all inputs, but allocates
none: only a check reads weights, and device memory is taken for one package at a time.

Run as ``python -m snapcap.warmup.build.compile_worker``; never imported by a server.
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from snapcap.models.config import ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.layers.fused import compiled_function
from snapcap.models.layers.weights import RegionFunction
from snapcap.models.memory.memory import Spec
from snapcap.models.memory.torch_memory import spec_of
from snapcap.models.processing.transform import ImageTransform
from snapcap.models.regions.table import Region, Weights
from snapcap.models.weights.load import load_weights
from snapcap.warmup.build.environment import share_interface, skip_denied_locks, skip_vector_tests
from snapcap.warmup.machine.worker import Task, serve_tasks
from snapcap.warmup.plan.memory import MemoryPlan
from snapcap.warmup.plan.plan import Bucket, PlannedJob, inductor_options
from snapcap.warmup.runtime.aoti.packages import entry_name, is_whole, slim
from snapcap.warmup.runtime.model import Model
from snapcap.warmup.runtime.torch_model import DTYPES, open_device


@dataclass(frozen=True)
class Workbench:
    """Holds a worker's job, the described model, and the device that packages are built for."""

    job: PlannedJob
    model: Model[Spec]
    device: torch.device
    dtype: torch.dtype


# Compiles or checks a region at a bucket. Takes the package's path and the task's other members; returns the
# members of the answer.
Work = Callable[..., dict[str, Any]]


def serve_regions(work: Work) -> int:
    """Read the job, then a line {"region": …, "size": …} for each task, until the input ends. Each answer has the
    result of ``work`` and the name of the entry. Returns the exit status."""

    gc.disable()  # a compiler's objects live on; searching them for garbage takes a fifteenth of a build

    def start(job: PlannedJob) -> Task:
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

    return serve_tasks(PlannedJob, start)


def open_workbench(job: PlannedJob) -> Workbench:
    """Set up torch in this process and describe the model, without reading a weight."""
    plan = job.plan
    config = ModelConfig.from_folder(job.checkpoint, image_tokens=plan.image_tokens)
    config = config.with_text_tokens(plan.text_tokens)
    device, dtype = open_device(plan)
    described = MemoryPlan(config, plan)
    weights = job_weights(job, config, torch.device("meta"))
    specs = {
        name: tuple(tuple(spec_of(tensor) for tensor in layer) for layer in layers)
        for name, layers in weights.sets.items()
    }
    return Workbench(job, Model(config, described.regions, Weights(specs), described.buffers.state), device, dtype)


def job_weights(job: PlannedJob, config: ModelConfig, place: torch.device) -> Weights[Tensor]:
    """Returns the checkpoint's weights in the layout of the job's device. Raises WeightsError if unreadable."""
    transform = ImageTransform.from_folder(job.checkpoint, config.vision.image_size, family=config.vision.family)
    dtype = DTYPES[job.plan.dtype]
    normalisation = transform.normalisation
    return load_weights(job.checkpoint, config, normalisation, place, dtype, layout=job.plan.device_type)


def empty(spec: Spec, device: torch.device) -> Tensor:
    """Returns an uninitialised tensor of the shape, strides and dtype of ``spec``."""
    dtype, shape, strides = spec
    return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device)


# Inductor writes files of its cache folder in place, and may read a file that another build on this machine is
# still writing. The file is complete by the next attempt.
ATTEMPTS = 3


class _RegionModule(torch.nn.Module):
    """Wraps a region's function as the module that `torch.export` takes. Weights are inputs, so it has no state."""

    def __init__(self, function: RegionFunction) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._function(*inputs)


def compile_region(bench: Workbench, region: Region, bucket: Bucket, path: Path) -> None:
    """Export a region for a bucket's shapes and write its package.

    The inputs are fake tensors, which take no memory: Inductor allocates a kernel's inputs when it tries the
    kernel. Export allows no graph break: code that it cannot trace is an error that shows the line."""
    import torch._inductor  # noqa: PLC0415  takes seconds; only compilers need it

    plan = bench.job.plan
    skip_vector_tests(plan.device_type)
    torch.backends.cuda.enable_cudnn_sdp(plan.takes_cudnn_attention(region.component))
    with FakeTensorMode():
        inputs = tuple(empty(spec, bench.device) for spec in bench.model.inputs(region, bucket))
    program = torch.export.export(
        _RegionModule(compiled_function(region.function, bench.device, bench.dtype)), inputs
    )
    options = inductor_options(plan.mode(region.component), plan.device_type)
    if not torch._inductor.config.cpp_cache_precompile_headers:  # the variable does not apply to packages
        options["aot_inductor.precompile_headers"] = False
    temporary = path.with_name(f".{path.name}.{os.getpid()}.pt2")
    for _ in range(ATTEMPTS):
        torch._inductor.aoti_compile_and_package(program, package_path=str(temporary), inductor_configs=options)
        if is_whole(temporary):
            break
    slim(temporary)
    temporary.replace(path)  # whole or not at all: an interrupted build keeps what is done


def build(bench: Workbench, region: Region, bucket: Bucket, path: Path) -> dict[str, Any]:
    """Write a package; returns the seconds that it took, and the input specs of the package."""
    path.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    compile_region(bench, region, bucket, path)
    return {"inputs": bench.model.input_specs(region, bucket), "seconds": time.monotonic() - started}


if __name__ == "__main__":
    skip_denied_locks(Path(gettempdir()))
    share_interface()
    sys.exit(serve_regions(build))
