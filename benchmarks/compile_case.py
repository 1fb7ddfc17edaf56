"""One way to compile a captioner, in a process of its own: what the first steps cost, and what later ones take.

    python -m benchmarks.compile_case regional --model FOLDER [--as-jit] [--save FOLDER | --restore FOLDER]

``full``: one `torch.compile` over the whole encoder and one over the whole decode step. ``hierarchical``: the same,
with the block marked as a nested region. ``regional``: one over each region, so that a block is compiled once for
all layers. ``--only`` leaves the other component eager. Knows `models` and `warmup` alone, and marks each stretch.
"""

import argparse
import shutil
import statistics
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.marks import mark, memory, result

WAYS = ("eager", "full", "hierarchical", "regional")
COMPONENTS = ("encoder", "decoder")
MODES = ("default", "max-autotune", "reduce-overhead")
REPEATS = 30
TOKENS = 12


class Case:
    """Encode and decode step at each bucket, over one model's static buffers."""

    def __init__(
        self,
        model: Any,
        device: Any,
        image: Any,
        way: str,
        only: str | None,
        modes: dict[str, str],
        as_jit: bool = False,
    ) -> None:
        """``image``: its pixels, uint8 [height, width, 3]; every row is this one. ``as_jit``: with the options that
        the jit backend adds."""
        import torch

        self._model = model
        self._device = device
        self._modes = modes
        self._as_jit = as_jit
        self._ways = {name: way if only in (None, name) else "eager" for name in COMPONENTS}
        self._steps: dict[tuple[str, int], Callable[[], Any]] = {}
        rows = model.state.slots
        self._pixels = torch.tensor(image, device=device).repeat(rows, 1, 1, 1)
        self._slots = torch.arange(rows, device=device)

    def run(self, component: str, rows: int) -> Any:
        """One batch of images, or one token more for the first rows; waits for the device."""
        if (component, rows) not in self._steps:
            self._steps[component, rows] = self._encode(rows) if component == "encoder" else self._step(rows)
        out = self._steps[component, rows]()
        self._wait()
        return out

    def capture(self, component: str, rows: int) -> None:
        """Replay a CUDA graph of it from now on, as a server does."""
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._steps[component, rows]()
        self._steps[component, rows] = graph.replay

    def begin(self) -> None:
        """Every row at its start token."""
        state = self._model.state
        state.tokens.fill_(self._model.config.generation.start_id)
        state.positions.zero_()
        state.forced.fill_(-1)
        self._wait()

    def tokens(self, count: int) -> list[int]:
        """Greedy tokens of the first image."""
        self.run("encoder", 1)
        self.begin()
        found = []
        for _ in range(count):
            self.run("decoder", 1)
            found.append(int(self._model.state.tokens[0]))
        return found

    def _encode(self, rows: int) -> Callable[[], Any]:
        before, block, after = self._parts("encoder", rows)

        def encode(pixels: Any, slots: Any, keys: Any, values: Any, first: Any, layers: Any, last: Any) -> Any:
            hidden = before(pixels, *first)
            for layer in layers:
                hidden = block(hidden, *layer)
            return after(hidden, slots, keys, values, *last)

        state = self._model.state
        weights = self._weights("encoder")
        run = self._whole("encoder", encode, rows)
        return partial(run, self._pixels[:rows], self._slots[:rows], state.cross_key, state.cross_value, *weights)

    def _step(self, rows: int) -> Callable[[], Any]:
        before, block, after = self._parts("decoder", rows)

        def step(tokens: Any, positions: Any, forced: Any, caches: Any, first: Any, layers: Any, last: Any) -> Any:
            hidden = before(tokens, positions, *first)
            for cache, layer in zip(caches, layers, strict=True):
                hidden = block(hidden, positions, *cache, *layer)
            return after(hidden, tokens, positions, forced, *last)

        state = self._model.state
        caches = [(c.key, c.value, c.cross_key, c.cross_value) for c in state.layers(rows)]
        run = self._whole("decoder", step, rows)
        views = (state.tokens[:rows], state.positions[:rows], state.forced[:rows])
        return partial(run, *views, caches, *self._weights("decoder"))

    def _parts(self, component: str, rows: int) -> list[Callable[..., Any]]:
        """The component's three regions."""
        import torch

        from models.fused import compiled_function

        way = self._ways[component]
        parts = []
        for region in self._model.regions:
            if region.component != component:
                continue
            function = region.function
            if way != "eager":  # what the server compiles
                function = compiled_function(region, self._device, self._model.dtype)
            if way == "regional":
                function = self._compiled(component, function, f"{region.name}_b{rows}")
            elif way == "hierarchical" and region.layers > 1:
                function = torch.compiler.nested_compile_region(_plain(function))
            parts.append(function)
        return parts

    def _whole(self, component: str, function: Callable[..., Any], rows: int) -> Callable[..., Any]:
        if self._ways[component] in ("full", "hierarchical"):
            return self._compiled(component, function, f"{component}_b{rows}")
        return function

    def _compiled(self, component: str, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Compiled under a code object of its own, with the options of its component's mode."""
        from warmup.backends.jit import ALONE, compile_static, own_code
        from warmup.modes import inductor_options

        mode = self._modes[component]
        cudagraphs = {"triton.cudagraphs": True} if mode == "reduce-overhead" else {}
        options = {**inductor_options(mode, self._device.type), **cudagraphs, **(ALONE if self._as_jit else {})}
        return compile_static(own_code(function, function, name, lambda: None), options)

    def _weights(self, component: str) -> tuple[Any, Any, Any]:
        sets = self._model.weights.sets
        return (sets[f"{component}_before"][0], sets[f"{component}_block"], sets[f"{component}_after"][0])

    def _wait(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize()


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A region takes its dimensions by `functools.partial`, which cannot be marked."""

    def run(*inputs: Any) -> Any:
        return function(*inputs)

    return run


def load(options: argparse.Namespace) -> tuple[Any, Any, Any, Any]:
    """Model, device and plan, as the server has them, and the pixels of the image."""
    from warmup.device import open_device
    from warmup.model import load_model
    from warmup.options import StartOptions, StoreOptions
    from warmup.plan import make_plan
    from warmup.prepare import read_checkpoint

    start = StartOptions(
        options.model,
        Path(),
        StoreOptions(Path()),
        device=options.device,
        dtype=options.dtype,
        backend="eager",
        buckets=options.buckets,
        threads=options.threads,
    )
    checkpoint = read_checkpoint(start)
    plan = make_plan(checkpoint.config, start)
    device, dtype = open_device(plan)
    model = load_model(checkpoint.folder, checkpoint.config, checkpoint.transform, plan, device, dtype)
    return model, device, plan, checkpoint.transform.decode(options.image.read_bytes()).pixels


def first_steps(case: Case, buckets: tuple[int, ...]) -> dict[str, float]:
    """The first call of every component and bucket, which compiles it: seconds by component."""
    seconds = dict.fromkeys(COMPONENTS, 0.0)
    case.begin()
    for size in buckets:
        for component in COMPONENTS:
            began = time.perf_counter()
            case.run(component, size)
            seconds[component] += time.perf_counter() - began
        if size == buckets[0]:
            mark("first_step")
    mark("all_buckets")
    return {f"initial_{component}": value for component, value in seconds.items()}


def steady_steps(case: Case, buckets: tuple[int, ...], suffix: str = "") -> dict[str, float]:
    """Median milliseconds of every component and bucket from now on."""
    found = {}
    for component in COMPONENTS:
        for size in buckets:
            seconds = []
            for _ in range(REPEATS + 3):
                case.begin()
                began = time.perf_counter()
                case.run(component, size)
                seconds.append(time.perf_counter() - began)
            found[f"{component}_{size}{suffix}"] = statistics.median(seconds[3:]) * 1000
    return found


def restore(folder: Path, libraries: bool) -> None:
    """Read what another process has compiled; ``libraries``: also what torch leaves out of its artifacts."""
    import torch
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if libraries:
        with zipfile.ZipFile(folder / "libraries.zip") as archive:
            archive.extractall(cache_dir())
    torch.compiler.load_cache_artifacts((folder / "cache.bin").read_bytes())


def save(folder: Path) -> None:
    """Keep what was compiled, in the form of a jit artifact set."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    from warmup.compile_cache import CompileCache

    folder.mkdir(parents=True, exist_ok=True)
    for path in CompileCache(Path(cache_dir())).save().values():
        shutil.copy(path, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--image", type=Path, required=True, help="the image to encode")
    parser.add_argument("--only", choices=COMPONENTS, help="leave the other component eager")
    parser.add_argument("--encoder-mode", choices=MODES, default="default")
    parser.add_argument("--decoder-mode", choices=MODES, default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--buckets", type=lambda text: tuple(map(int, text.split(","))), default=(1, 4))
    parser.add_argument("--save", type=Path, help="write what was compiled to this folder afterwards")
    parser.add_argument("--restore", type=Path, help="read it first")
    parser.add_argument("--as-jit", action="store_true", help="as the jit backend, which restores libraries too")
    options = parser.parse_args()
    mark("interpreter")
    import torch

    mark("import_torch")
    model, device, plan, image = load(options)
    mark("load_weights")
    if options.way != "eager":
        import torch._dynamo
        import torch._inductor.compile_fx

        mark("import_compiler")
    if options.restore:
        restore(options.restore, options.as_jit)
        mark("restore")
    modes = {"encoder": options.encoder_mode, "decoder": options.decoder_mode}
    case = Case(model, device, image, options.way, options.only, modes, options.as_jit)
    values: dict[str, Any] = first_steps(case, plan.buckets)
    values |= memory()
    if device.type == "cuda":
        values["device_peak_mib"] = torch.cuda.max_memory_allocated() / (1 << 20)
    values |= steady_steps(case, plan.buckets)
    values["tokens"] = case.tokens(TOKENS)
    if device.type == "cuda" and "reduce-overhead" not in modes.values():
        for size in reversed(plan.buckets):
            for component in COMPONENTS:
                case.capture(component, size)
        values |= steady_steps(case, plan.buckets, "_graph")
    if options.way != "eager":
        from warmup.compile_events import cache_counts, compiled_graphs

        values |= {"graphs": compiled_graphs(), **cache_counts()._asdict()}
    result(values)
    if options.save:
        save(options.save)
    mark("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
