"""The `jit` backend: `torch.compile` of each region at each bucket, in the process that serves.

After the warm-up nothing is compiled any more: a call that no compiled graph fits runs the region's own function.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.fused import compiled_function
from models.regions import Region, RegionFunction
from warmup.buckets import Bucket
from warmup.modes import inductor_options
from warmup.plan import Plan

OnFallback = Callable[[str, int], None]

_OF_PACKAGES = "aot_inductor."  # options that nothing here has a use for


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
        """The region's function, to be compiled for the shapes of its first call; a graph break is an error."""
        name = f"{region.name}_b{bucket.size}"
        function = compiled_function(region, torch.device(self.plan.device), getattr(torch, self.plan.dtype))
        options = inductor_options(self.plan.mode(region.component), self.plan.device_type)
        compiled: RegionFunction = torch.compile(
            own_code(function, name, lambda: self.on_fallback(region.name, bucket.size)),
            fullgraph=True,
            dynamic=False,
            options={key: value for key, value in options.items() if not key.startswith(_OF_PACKAGES)},
        )
        return compiled


def own_code(function: RegionFunction, name: str, on_eager: Callable[[], None]) -> RegionFunction:
    """The same function under a name and a code object of its own; calls ``on_eager`` when it is not compiled.

    Dynamo keeps graphs, and counts recompiles, by code object. Regions that shared one would look each other's
    guards through at every call, and from the ninth bucket on exceed `recompile_limit`.
    """

    def run(*inputs: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():  # a constant where it is traced
            on_eager()
        return function(*inputs)

    code = run.__code__.replace(co_name=name, co_qualname=name)
    return types.FunctionType(code, run.__globals__, name, None, run.__closure__)
