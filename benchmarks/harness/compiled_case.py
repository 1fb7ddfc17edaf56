"""Compiles a captioner in one way, in a process of its own, and marks each phase of its start.

Every bucket is compiled, and on a GPU captured as a CUDA graph, as in a server before it is ready. An encode and a
decode step are measured at each bucket, before and after the capture. A model that takes pictures of any shape
encodes for one number of tokens: the fewest of a server's that hold the picture. `snapcap bench modes` runs this
module with a `Job` as JSON.
"""

import math
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from snapcap.benchmarks.harness.marks import mark, memory, result, series_ms
from snapcap.models.json_object import from_json
from snapcap.models.processing.packed import grid_of
from snapcap.models.regions.table import Region, RegionCall
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.plan.plan import Bucket, inductor_options
from snapcap.warmup.progress.status import COMPONENTS, ComponentName
from snapcap.warmup.runtime.devices import Device, Pixels
from snapcap.warmup.runtime.model import EagerBackend
from snapcap.warmup.runtime.runner import Callables, Runner, open_callables
from snapcap.warmup.runtime.slot_request import SlotRequest

if TYPE_CHECKING:
    from snapcap.warmup.runtime.torch_model import LoadedModel

Way = Literal["eager", "full", "hierarchical", "regional", "jit"]
Mode = Literal["default", "max-autotune", "reduce-overhead"]
TOKENS = 20


@dataclass(frozen=True)
class How:
    """A way to compile.

    way: ``full`` is one `torch.compile` over the whole encoder and one over the whole decode step.
        ``hierarchical`` is ``full`` with the block marked as a nested region. ``regional`` is one `torch.compile`
        over each region, so a block is compiled once for all layers. These three compile the plain regions.
        ``jit`` is ``regional`` with the jit backend's regions and options.
    only: the component that is compiled, while the other one stays eager. None compiles both.
    """

    way: Way
    only: str | None = None
    encoder_mode: Mode = "default"
    decoder_mode: Mode = "default"

    def of(self, component: str) -> Way:
        return self.way if self.only in (None, component) else "eager"

    @property
    def captures(self) -> bool:
        """True if torch captures CUDA graphs itself."""
        return "reduce-overhead" in (self.encoder_mode, self.decoder_mode)


@dataclass(frozen=True)
class Job:
    """A case on a checkpoint, with one image, on a device, in all batch sizes. The compiled code is read from the
    folder ``restore`` first, or written to ``save`` at the end."""

    model: Path
    image: Path
    device: str
    buckets: tuple[int, ...]
    how: How
    save: Path | None = None
    restore: Path | None = None


class CompiledRunner(Runner[Any]):
    """Runs regions that are compiled one by one, or all regions of a component as one function."""

    def __init__(self, model: "LoadedModel", device: Device[Any], how: How) -> None:
        super().__init__(model, device)
        self._how = how
        self._torch = model.device

    def open(self, bucket: Bucket, image: Pixels) -> None:
        """Binds the regions of a bucket, which are compiled when they first run. A model for pictures of any shape
        encodes for one number of tokens."""
        for component in COMPONENTS:
            run = tuple(self._region(component, region, bucket) for region in self.regions.of(component))
            eager = open_callables(self.regions, component, bucket, EagerBackend())
            self.bind(component, bucket, eager._replace(regions=run))
        plan, tokens = self._encode[bucket], math.prod(grid_of(image)) if self.state.grids is not None else 0
        self._encode[bucket] = replace(plan, encodes={0: plan.holding(tokens)})

    def _region(self, component: ComponentName, region: Region, bucket: Bucket) -> RegionCall:
        import torch

        from snapcap.models.layers.fused import compiled_function

        way, function = self._how.of(component), region.function
        if way == "jit":
            function = compiled_function(function, self._torch, self.state.key.dtype)
        if way in ("regional", "jit"):
            return self._compiled(component, function, f"{region.name}_b{bucket.size}")
        if way == "hierarchical" and region.layers > 1:
            plain = region.function  # torch cannot mark a `functools.partial` as a nested region, but a lambda
            function = torch.compiler.nested_compile_region(lambda *inputs: plain(*inputs))  # noqa: PLW0108
        return function

    def _calls(
        self,
        component: ComponentName,
        bucket: Bucket,
        callables: Callables,
        own: Mapping[str, Any],
        tokens: int = 0,
    ) -> list[tuple[RegionCall, tuple[Any, ...]]]:
        calls = super()._calls(component, bucket, callables, own, tokens)
        if self._how.captures:
            import torch

            # Without this mark, torch captures no graph of a step that writes to a tensor.
            for tensor in (*own.values(), *(tensor for _, inputs in calls for tensor in inputs)):
                torch._dynamo.mark_static_address(tensor)
        if self._how.of(component) not in ("full", "hierarchical"):
            return calls
        run = [call for call, _ in calls]

        def whole(hidden: Any, inputs: Sequence[Any]) -> Any:
            for place, call in enumerate(run):
                hidden = call(hidden, *inputs[place])
            return hidden

        name = f"{component}_b{bucket.size}_{tokens}"
        return [(self._compiled(component, whole, name), ([inputs for _, inputs in calls],))]

    def _compiled(self, component: ComponentName, function: Callable[..., Any], name: str) -> RegionCall:
        """Returns the function compiled under a code object of its own, with the options of its component's
        mode."""
        from snapcap.warmup.start.jit import ALONE, compile_static, own_code

        mode = self._how.encoder_mode if component == "encoder" else self._how.decoder_mode
        options = inductor_options(mode, self._torch.type)
        if mode == "reduce-overhead":
            options["triton.cudagraphs"] = True
        if self._how.way == "jit":
            options |= ALONE
        return compile_static(own_code(function, function, name, lambda: None), options)

    def step(self, component: ComponentName, bucket: Bucket, image: Pixels) -> None:
        """Encodes one batch of images, or decodes one token of each row. Waits for the device."""
        if component == "encoder":
            self.encode(bucket, [image] * bucket.size, 0)
        else:
            self.decode_step(bucket)
        self.device.wait()

    def begin(self, bucket: Bucket) -> None:
        """Puts every row at its start token."""
        self.admit(0, [SlotRequest()] * bucket.size)
        self.device.wait()

    def caption(self, bucket: Bucket, image: Pixels) -> list[int]:
        """Returns greedy tokens of the image. Each token is read back at once, as a server does to find the last
        one."""
        self.step("encoder", bucket, image)
        self.begin(bucket)
        found = []
        for _ in range(TOKENS):
            self.decode_step(bucket)
            found.append(self.tokens(1)[0])
        return found


def first_steps(runner: CompiledRunner, buckets: Sequence[Bucket], image: Pixels) -> dict[str, float]:
    """Runs every component and bucket for the first time, which compiles it. Returns seconds by component."""
    seconds = dict.fromkeys((f"initial_{component}" for component in COMPONENTS), 0.0)
    for bucket in buckets:
        runner.open(bucket, image)
        runner.begin(bucket)
        for component in COMPONENTS:
            began = time.perf_counter()
            runner.step(component, bucket, image)
            seconds[f"initial_{component}"] += time.perf_counter() - began
            mark(f"compile_{component}")
    return seconds


def steady_steps(
    runner: CompiledRunner, buckets: Sequence[Bucket], image: Pixels, suffix: str = ""
) -> dict[str, float]:
    """Returns the milliseconds of every component and bucket once compiled."""
    found = {}
    for bucket in buckets:
        timed = partial(series_ms, rewind=partial(runner.begin, bucket), wait=runner.device.wait)
        found[f"encoder_{bucket.size}{suffix}"] = timed(partial(runner.encode, bucket, [image] * bucket.size, 0))
        found[f"decoder_{bucket.size}{suffix}"] = timed(partial(runner.decode_step, bucket))
    return found


def restore(folder: Path, libraries: bool) -> None:
    """Reads the compiled code that another process saved. With ``libraries``, also reads the libraries that torch
    leaves out of its artifacts."""
    import torch
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if libraries:
        with zipfile.ZipFile(folder / "libraries.zip") as archive:
            archive.extractall(cache_dir())
    torch.compiler.load_cache_artifacts((folder / "cache.bin").read_bytes())


def save(folder: Path) -> None:
    """Saves the compiled code, in the form of a jit artifact set."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    from snapcap.warmup.start.jit import CompileCache

    folder.mkdir(parents=True, exist_ok=True)
    for path in CompileCache(Path(cache_dir())).save().values():
        shutil.copy(path, folder)


def main() -> int:
    job = from_json(Job, sys.argv[1])
    how = job.how
    mark("interpreter")
    import torch

    mark("import_torch")
    from snapcap.warmup.plan.checkpoint import read_checkpoint
    from snapcap.warmup.plan.plan import make_plan
    from snapcap.warmup.runtime.torch_model import load_model, open_device, torch_device

    compute = ComputeOptions(device=job.device, backend="eager", buckets=job.buckets)
    start = StartOptions(ModelOptions(str(job.model)), compute)
    checkpoint = read_checkpoint(start)
    plan = make_plan(checkpoint.config, start)
    mark("checkpoint")
    device, dtype = open_device(plan)
    mark("device_init")
    model = load_model(checkpoint.folder, checkpoint.config, checkpoint.transform, plan, device, dtype)
    mark("load_weights")
    image, buckets = checkpoint.transform.decode(job.image.read_bytes()).pixels, plan.table.buckets
    if how.way != "eager":
        import torch._dynamo
        import torch._inductor.compile_fx

        mark("import_compiler")
    if job.restore:
        restore(job.restore, how.way == "jit")
        mark("restore")
    runner = CompiledRunner(model, torch_device(device), how)
    values: dict[str, Any] = {**first_steps(runner, buckets, image), **memory()}
    if device.type == "cuda":
        values["device_peak_mib"] = torch.cuda.max_memory_allocated() / (1 << 20)
    values |= steady_steps(runner, buckets, image)
    captures = device.type == "cuda" and not how.captures
    if captures:
        for bucket, component in product(reversed(buckets), COMPONENTS):
            runner.capture(component, bucket)
        mark("capture_graphs")
    values["tokens"] = runner.caption(buckets[0], image)
    if captures:
        values |= steady_steps(runner, buckets, image, "_graph")
    if how.way != "eager":
        from snapcap.warmup.progress.status import cache_counts, compiled_graphs

        values |= {"graphs": compiled_graphs(), **cache_counts()._asdict()}
    result(values)
    if job.save:
        save(job.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
