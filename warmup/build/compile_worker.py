"""Compiles regions in a worker process: exports and compiles one at a bucket for each line it is sent.

    stdin   {"checkpoint": folder, "plan": {…}, "folder": where packages go}, then {"region": …, "size": …} a line
    stdout  {"entry": …, "inputs": […], "seconds": …} or {"error": …} a line

Run as ``python -m snapcap.warmup.build.compile_worker``; never imported by a server.
"""

import os
import sys
import time
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from snapcap.models.layers.fused import compiled_function
from snapcap.models.layers.weights import RegionFunction
from snapcap.models.regions.table import Region
from snapcap.warmup.build.environment import skip_denied_locks, skip_vector_tests
from snapcap.warmup.build.worker import Workbench, empty, serve_regions
from snapcap.warmup.plan.buckets import Bucket
from snapcap.warmup.plan.plan import inductor_options
from snapcap.warmup.runtime.aoti.packages import is_whole, slim

# Inductor writes into its cache folder in place, and may take a file from there that another build on this machine
# is writing. By the next attempt that is done.
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

    The inputs are fake tensors, which take no memory: Inductor makes those of a kernel when it tries that kernel.
    Export admits no graph break: what it cannot trace is an error that shows the line.
    """
    import torch._inductor  # noqa: PLC0415  seconds, and only ever here

    plan = bench.job.plan
    skip_vector_tests(plan.device_type)
    torch.backends.cuda.enable_cudnn_sdp(plan.takes_cudnn_attention(region.component))
    with FakeTensorMode():
        inputs = tuple(empty(spec, bench.device) for spec in bench.model.inputs(region, bucket))
    program = torch.export.export(
        _RegionModule(compiled_function(region.function, bench.device, bench.dtype)), inputs
    )
    options = inductor_options(plan.mode(region.component), plan.device_type)
    if not torch._inductor.config.cpp_cache_precompile_headers:  # the variable does not speak for packages
        options["aot_inductor.precompile_headers"] = False
    temporary = path.with_name(f".{path.name}.{os.getpid()}.pt2")
    for _ in range(ATTEMPTS):
        torch._inductor.aoti_compile_and_package(program, package_path=str(temporary), inductor_configs=options)
        if is_whole(temporary):
            break
    slim(temporary)
    temporary.replace(path)  # whole or not at all: an interrupted build keeps what is done


def build(bench: Workbench, region: Region, bucket: Bucket, path: Path) -> dict[str, Any]:
    """Write a package; answers how long it took and which inputs it was built for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    compile_region(bench, region, bucket, path)
    return {"inputs": bench.model.input_specs(region, bucket), "seconds": time.monotonic() - started}


if __name__ == "__main__":
    skip_denied_locks(Path(gettempdir()))
    sys.exit(serve_regions(build))
