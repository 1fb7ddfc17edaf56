"""The field's ways to start with compiled code, on this repository's own regions: what `aot` is compared with.

    python -m benchmarks.strategies regional --model FOLDER [--save FILE | --restore FILE]

``full``: one `torch.compile` over the whole encoder and one over the whole decode step. ``regional``: one over
each region, so that a block is compiled once for all layers. ``--restore`` loads what a run with ``--save`` wrote
(`torch.compiler.save_cache_artifacts`). Compiles every bucket, captures CUDA graphs on a GPU, and captions one
image, in process: no HTTP server is started, which is to these strategies' advantage. Marks each stretch.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.marks import mark, memory, result
from service.options import parse_buckets

REPEATS = 10


class Strategy:
    """Compiled encode and decode step over one model's static buffers."""

    def __init__(self, model: Any, device: Any, whole: bool) -> None:
        import torch

        self._model = model
        self._device = device
        self._graphs: dict[tuple[str, int], Callable[[], object]] = {}
        vision = model.config.vision

        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, fullgraph=True, dynamic=False)

        inner = (lambda function: function) if whole else compiled
        outer = compiled if whole else (lambda function: function)
        parts = {region.name: inner(region.function) for region in model.regions}

        def encode(pixels: Any, slots: Any, keys: Any, values: Any, weights: Any) -> Any:
            hidden = parts["encoder_before"](pixels, *weights["encoder_before"][0])
            for layer in weights["encoder_block"]:
                hidden = parts["encoder_block"](hidden, *layer)
            return parts["encoder_after"](hidden, slots, keys, values, *weights["encoder_after"][0])

        def step(tokens: Any, positions: Any, forced: Any, caches: Any, weights: Any) -> Any:
            hidden = parts["decoder_before"](tokens, positions, *weights["decoder_before"][0])
            for cache, layer in zip(caches, weights["decoder_block"], strict=True):
                hidden = parts["decoder_block"](hidden, positions, *cache, *layer)
            return parts["decoder_after"](hidden, tokens, positions, forced, *weights["decoder_after"][0])

        self._encode, self._step = outer(encode), outer(step)
        rows = model.state.slots
        self.pixels = torch.zeros(rows, *vision.image_size, 3, dtype=torch.uint8, device=device)
        self._slots = torch.arange(rows, device=device)

    def encode(self, rows: int) -> object:
        """Encode the first images of ``pixels`` into the first slots."""
        return self._run("encoder", rows)

    def step(self, rows: int) -> object:
        """One token more for the first rows."""
        return self._run("decoder", rows)

    def capture(self, component: str, rows: int) -> None:
        """Keep what a bucket launches as a CUDA graph."""
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._call(component, rows)
        self._graphs[component, rows] = graph.replay

    def caption(self, rows: int, tokens: int) -> list[int]:
        """Greedy tokens of the first row; each is read back, as a server does to see whether it is the last."""
        state = self._model.state
        self.encode(rows)
        state.tokens.fill_(self._model.config.generation.start_id)
        state.positions.zero_()
        state.forced.fill_(-1)
        found = []
        for _ in range(tokens):
            self.step(rows)
            found.append(state.tokens[:rows].tolist()[0])
        return found

    def wait(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    def _run(self, component: str, rows: int) -> object:
        replay = self._graphs.get((component, rows))
        return replay() if replay is not None else self._call(component, rows)

    def _call(self, component: str, rows: int) -> object:
        model, state = self._model, self._model.state
        weights = model.weights.sets
        if component == "encoder":
            return self._encode(self.pixels[:rows], self._slots[:rows], state.cross_key, state.cross_value, weights)
        caches = [(c.key, c.value, c.cross_key, c.cross_value) for c in state.layers(rows)]
        return self._step(state.tokens[:rows], state.positions[:rows], state.forced[:rows], caches, weights)


def load(options: argparse.Namespace) -> tuple[Any, Any, Any, Any]:
    """Checkpoint, plan, model and device, as the server has them."""
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
        backend="eager",
        buckets=parse_buckets(options.buckets),
    )
    checkpoint = read_checkpoint(start)
    plan = make_plan(checkpoint.config, start)
    mark("checkpoint")
    device, dtype = open_device(plan)
    mark("device_init")
    model = load_model(checkpoint.folder, checkpoint.config, checkpoint.transform, plan, device, dtype)
    mark("load_weights")
    return checkpoint, plan, model, device


def warm(strategy: Strategy, buckets: tuple[int, ...], cuda: bool) -> None:
    """Compile every bucket, and capture it on a GPU."""
    for size in buckets:
        strategy.encode(size)
        strategy.wait()
        mark("compile_encoder")
        strategy.step(size)
        strategy.wait()
        mark("compile_decoder")
    if cuda:
        for size in reversed(buckets):
            strategy.capture("encoder", size)
            strategy.capture("decoder", size)
        mark("capture_graphs")


def steady(strategy: Strategy, tokens: int, expected: list[int]) -> float:
    """Median seconds of a caption from now on.

    Raises:
        RuntimeError: the tokens change.
    """
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        again = strategy.caption(1, tokens)
        seconds.append(time.perf_counter() - began)
        if again != expected:
            raise RuntimeError(f"the same image gave other tokens: {expected}, {again}")
    return statistics.median(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategy", choices=("full", "regional"))
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--image", type=Path, required=True, help="the image to caption")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--buckets", default="auto")
    parser.add_argument("--tokens", type=int, default=20)
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--save", type=Path, help="write the compilers' caches afterwards")
    kept.add_argument("--restore", type=Path, help="read the compilers' caches first")
    options = parser.parse_args()
    mark("interpreter")
    import torch

    mark("import_torch")
    checkpoint, plan, model, device = load(options)
    import torch._dynamo

    # One code object for every bucket, so as many graphs as buckets.
    torch._dynamo.config.recompile_limit = 64
    mark("import_dynamo")
    if options.restore:
        torch.compiler.load_cache_artifacts(options.restore.read_bytes())
        mark("load_caches")
    strategy = Strategy(model, device, whole=options.strategy == "full")
    warm(strategy, plan.buckets, device.type == "cuda")
    image = checkpoint.transform.decode(options.image.read_bytes()).pixels
    strategy.pixels[0].copy_(torch.from_numpy(image))
    tokens = strategy.caption(1, options.tokens)
    mark("first_caption")
    result({"steady_ms": steady(strategy, options.tokens, tokens) * 1000, **memory()})
    if options.save:
        saved = torch.compiler.save_cache_artifacts()
        if saved is None:
            raise RuntimeError("there are no compiler caches to save")
        options.save.write_bytes(saved[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
