"""Compiles each region at each bucket with `torch.compile`, in the process that serves: the `jit` backend.

After the warm-up nothing is compiled any more: a call that no compiled graph fits runs the region's own function.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from snapcap.models.dataclass import dataclass
from snapcap.models.regions.functions import RegionFunction
from snapcap.models.regions.fused.compiled import compiled_function
from snapcap.models.regions.table import Region
from snapcap.warmup.plan.buckets import Bucket
from snapcap.warmup.plan.plan import InductorOption, Plan, inductor_options
from snapcap.warmup.runtime.devices.torch_settings import DTYPES

OnFallback = Callable[[str, int], None]

# Precompiled headers make a CPU's first start faster where there are few CPUs. But torch makes them in a start that
# compiles nothing too, which takes longer than all else of it, and in a folder that all programs share.
ALONE: Mapping[str, InductorOption] = {"cpp_cache_precompile_headers": False}


@dataclass(frozen=True)
class JitBackend:
    """Compiles a callable when it is first called. ``on_fallback`` is told the region and bucket of each call that
    ran eager because none of its graphs fitted."""

    plan: Plan
    on_fallback: OnFallback

    @property
    def name(self) -> str:
        return "jit"

    def callable(self, region: Region, bucket: Bucket) -> RegionFunction:
        """Returns a function that compiles for the shapes of its first call; a graph break is an error. A region
        that is called on demand stays eager: no request may wait for a compiler."""
        if region.on_demand:
            return region.function
        plan = self.plan
        function = own_code(
            region.function,
            compiled_function(region, torch.device(plan.device), DTYPES[plan.dtype]),
            f"{region.name}_b{bucket.size}",
            lambda: self.on_fallback(region.name, bucket.size),
        )
        return compile_static(
            function, {**inductor_options(plan.mode(region.component), plan.device_type), **ALONE}
        )


def compile_static(function: RegionFunction, options: Mapping[str, InductorOption]) -> RegionFunction:
    """`torch.compile` as a whole and for fixed shapes, with those Inductor options that are not about packages."""
    own: dict[str, Any] = {key: value for key, value in options.items() if not key.startswith("aot_inductor.")}
    compiled: RegionFunction = torch.compile(function, fullgraph=True, dynamic=False, options=own)
    return compiled


def own_code(
    eager: RegionFunction, compiled: RegionFunction, name: str, on_eager: Callable[[], None]
) -> RegionFunction:
    """A function to compile, with a name and a code object of its own: ``compiled`` where it is traced, and
    ``eager``, after a call of ``on_eager``, where it is run instead.

    Dynamo keeps graphs, and counts recompiles, by code object. Regions that shared one would look each other's
    guards through at every call, and from the ninth bucket on exceed `recompile_limit`.
    """

    def run(*inputs: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # a constant for the tracer
            return compiled(*inputs)
        on_eager()
        return eager(*inputs)

    code = run.__code__.replace(co_name=name, co_qualname=name)
    return types.FunctionType(code, run.__globals__, name, None, run.__closure__)
