"""Compiles a captioner in one way, in a process of its own, and marks each phase of its start.

Every bucket is compiled, and on a GPU captured as a CUDA graph, as in a server before it is ready. An encode and a
decode step are measured at each bucket, before and after the capture. A model that takes pictures of any shape
encodes for one number of tokens: the fewest of a server's that hold the picture. `snapcap bench modes` runs this
module with a `Job` as JSON.
"""

import math
import shutil
import statistics
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from snapcap.benchmarks.harness.marks import mark, memory, result
from snapcap.models.json_object import from_json
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions

Way = Literal["eager", "full", "hierarchical", "regional", "jit"]
Mode = Literal["default", "max-autotune", "reduce-overhead"]
COMPONENTS = ("encoder", "decoder")
REPEATS = 30
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

    def mode(self, component: str) -> Mode:
        return self.encoder_mode if component == "encoder" else self.decoder_mode

    @property
    def captures(self) -> bool:
        """True if torch captures CUDA graphs itself."""
        return "reduce-overhead" in (self.encoder_mode, self.decoder_mode)


@dataclass(frozen=True)
class Setup:
    """The checkpoint folder, the image, the device and the batch sizes, which all cases share."""

    model: Path
    image: Path
    device: str
    buckets: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """A case. The compiled code is read from the folder ``restore`` first, or written to ``save`` at the end."""

    setup: Setup
    how: How
    save: Path | None = None
    restore: Path | None = None


class CompiledSteps:
    """Encode and decode step at each bucket, compiled when they first run."""

    def __init__(self, model: Any, device: Any, image: Any, how: How) -> None:
        """``image`` holds the pixels of every row, uint8 [height, width, 3]."""
        import torch

        from snapcap.models.processing.packed import grid_of

        self._model = model
        self._device = device
        self._how = how
        self._steps: dict[tuple[str, int], Callable[[], Any]] = {}
        rows, buckets = model.state.slots, model.config.vision.token_buckets
        self._tokens = 0  # to which the picture is padded, if it may have any shape
        if buckets:
            grid = grid_of(image)
            model.state.write_grids(range(rows), [grid] * rows)
            self._tokens = next(most for most in buckets if most >= math.prod(grid))
        self._pixels = torch.tensor(image[: self._tokens or None], device=device).repeat(rows, 1, 1, 1)
        self._slots = torch.arange(rows, device=device)

    def run(self, component: str, rows: int) -> Any:
        """Encodes one batch of images, or decodes one token in the first rows. Waits for the device."""
        if (component, rows) not in self._steps:
            self._steps[component, rows] = self._encode(rows) if component == "encoder" else self._step(rows)
        out = self._steps[component, rows]()
        self._wait()
        return out

    def capture(self, component: str, rows: int) -> None:
        """Captures a step as a CUDA graph, which later runs replay, as in a server."""
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._steps[component, rows]()
        self._steps[component, rows] = graph.replay

    def begin(self) -> None:
        """Puts every row at its start token."""
        state = self._model.state
        state.tokens.fill_(self._model.config.generation.start_id)
        state.positions.zero_()
        state.forced.fill_(-1)
        self._wait()

    def caption(self, rows: int, count: int) -> list[int]:
        """Returns greedy tokens of the image. Each token is read back at once, as a server does to find the last
        one."""
        self.run("encoder", rows)
        self.begin()
        found = []
        for _ in range(count):
            self.run("decoder", rows)
            found.append(int(self._model.state.tokens[0]))
        return found

    def _encode(self, rows: int) -> Callable[[], Any]:
        return self._bound("encoder", rows, self._pixels[:rows], {"slots": self._slots[:rows]})

    def _step(self, rows: int) -> Callable[[], Any]:
        from snapcap.models.regions.table import ROWS

        own = dict(zip(ROWS, self._model.state.rows(ROWS, rows), strict=True))
        return self._bound("decoder", rows, own["tokens"], own)

    def _bound(self, component: str, rows: int, first: Any, own: Mapping[str, Any]) -> Callable[[], Any]:
        """Returns the component's regions bound to ``own``, which are buffers of the step's rows, and to the
        model's buffers."""
        from snapcap.models.regions.table import layer_inputs, layer_order

        model = self._model
        regions = [region for region in model.regions.of(component) if region.tokens in (0, self._tokens)]
        parts, order = self._parts(component, regions, rows), layer_order(regions)

        def whole(first: Any, inputs: Any) -> Any:
            hidden = first
            for place, layer in order:
                hidden = parts[place](hidden, *inputs[place][layer])
            return hidden

        inputs = [
            [
                (*self._fixed(*buffers), *weights)
                for buffers, weights in zip(
                    layer_inputs(region, model.state, rows, own), model.weights.of(region), strict=True
                )
            ]
            for region in regions
        ]
        return partial(self._whole(component, whole, rows), *self._fixed(first), inputs)

    def _parts(self, component: str, regions: Sequence[Any], rows: int) -> list[Callable[..., Any]]:
        """Returns the functions of the component's regions that a greedy caption runs."""
        import torch

        from snapcap.models.layers.fused import compiled_function

        way = self._how.of(component)
        parts = []
        for region in regions:
            function = region.function
            if way == "jit":
                function = compiled_function(region.function, self._device, self._model.dtype)
            if way in ("regional", "jit"):
                function = self._compiled(component, function, f"{region.name}_b{rows}")
            elif way == "hierarchical" and region.layers > 1:
                function = torch.compiler.nested_compile_region(_plain(function))
            parts.append(function)
        return parts

    def _whole(self, component: str, function: Callable[..., Any], rows: int) -> Callable[..., Any]:
        if self._how.of(component) in ("full", "hierarchical"):
            return self._compiled(component, function, f"{component}_b{rows}")
        return function

    def _compiled(self, component: str, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Returns the function compiled under a code object of its own, with the options of its component's
        mode."""
        from snapcap.warmup.plan.plan import inductor_options
        from snapcap.warmup.start.jit import ALONE, compile_static, own_code

        mode = self._how.mode(component)
        options = inductor_options(mode, self._device.type)
        if mode == "reduce-overhead":
            options["triton.cudagraphs"] = True
        if self._how.way == "jit":
            options |= ALONE
        return compile_static(own_code(function, function, name, lambda: None), options)

    def _fixed(self, *tensors: Any) -> tuple[Any, ...]:
        """Marks tensors as staying at their address, without which torch captures no graph of a step that writes
        to them."""
        if self._how.captures:
            import torch

            for tensor in tensors:
                torch._dynamo.mark_static_address(tensor)
        return tensors

    def _wait(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize()


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a plain function, because torch cannot mark a `functools.partial` as a nested region."""

    def run(*inputs: Any) -> Any:
        return function(*inputs)

    return run


def first_steps(steps: CompiledSteps, buckets: tuple[int, ...]) -> dict[str, float]:
    """Runs every component and bucket for the first time, which compiles it. Returns seconds by component."""
    seconds = dict.fromkeys(COMPONENTS, 0.0)
    steps.begin()
    for size in buckets:
        for component in COMPONENTS:
            began = time.perf_counter()
            steps.run(component, size)
            seconds[component] += time.perf_counter() - began
            mark(f"compile_{component}")
    return {f"initial_{component}": value for component, value in seconds.items()}


def steady_steps(steps: CompiledSteps, buckets: tuple[int, ...], suffix: str = "") -> dict[str, float]:
    """Returns the median milliseconds of every component and bucket once compiled."""
    found = {}
    for component in COMPONENTS:
        for size in buckets:
            seconds = []
            for _ in range(REPEATS + 3):
                steps.begin()
                began = time.perf_counter()
                steps.run(component, size)
                seconds.append(time.perf_counter() - began)
            found[f"{component}_{size}{suffix}"] = statistics.median(seconds[3:]) * 1000
    return found


def capture(steps: CompiledSteps, buckets: tuple[int, ...]) -> None:
    for size in reversed(buckets):
        for component in COMPONENTS:
            steps.capture(component, size)
    mark("capture_graphs")


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


def open_model(setup: Setup) -> tuple[Any, Any, Any, Any]:
    """Returns checkpoint, plan, model and device, as a start has them before anything is compiled."""
    from snapcap.warmup.plan.checkpoint import read_checkpoint
    from snapcap.warmup.plan.plan import make_plan
    from snapcap.warmup.runtime.torch_model import load_model, open_device

    compute = ComputeOptions(device=setup.device, backend="eager", buckets=setup.buckets)
    start = StartOptions(ModelOptions(str(setup.model)), compute)
    checkpoint = read_checkpoint(start)
    plan = make_plan(checkpoint.config, start)
    mark("checkpoint")
    device, dtype = open_device(plan)
    mark("device_init")
    model = load_model(checkpoint.folder, checkpoint.config, checkpoint.transform, plan, device, dtype)
    mark("load_weights")
    return checkpoint, plan, model, device


def main() -> int:
    job = from_json(Job, sys.argv[1])
    how = job.how
    mark("interpreter")
    import torch

    mark("import_torch")
    checkpoint, plan, model, device = open_model(job.setup)
    image = checkpoint.transform.decode(job.setup.image.read_bytes()).pixels
    if how.way != "eager":
        import torch._dynamo
        import torch._inductor.compile_fx

        mark("import_compiler")
    if job.restore:
        restore(job.restore, how.way == "jit")
        mark("restore")
    steps, buckets = CompiledSteps(model, device, image, how), plan.buckets
    values: dict[str, Any] = first_steps(steps, buckets)
    values |= memory()
    if device.type == "cuda":
        values["device_peak_mib"] = torch.cuda.max_memory_allocated() / (1 << 20)
    values |= steady_steps(steps, buckets)
    captures = device.type == "cuda" and not how.captures
    if captures:
        capture(steps, buckets)
    values["tokens"] = steps.caption(buckets[0], TOKENS)
    if captures:
        values |= steady_steps(steps, buckets, "_graph")
    if how.way != "eager":
        from snapcap.warmup.progress.status import cache_counts, compiled_graphs

        values |= {"graphs": compiled_graphs(), **cache_counts()._asdict()}
    result(values)
    if job.save:
        save(job.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
