"""Compiles an encode and a decode step over one model's static buffers, in one of several ways."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

WAYS = ("eager", "full", "hierarchical", "regional", "jit")
COMPONENTS = ("encoder", "decoder")
MODES = ("default", "max-autotune", "reduce-overhead")


@dataclass(frozen=True)
class How:
    """A way to compile.

    way: ``full`` is one `torch.compile` over the whole encoder and one over the whole decode step.
        ``hierarchical`` is ``full`` with the block marked as a nested region. ``regional`` is one `torch.compile`
        over each region, so a block is compiled once for all layers. These three compile the plain regions.
        ``jit`` is ``regional`` with the jit backend's regions and options.
    only: the component that is compiled, while the other one stays eager. None compiles both.
    modes: each component's mode, if it is not ``default``.
    """

    way: str
    only: str | None = None
    modes: Mapping[str, str] = field(default_factory=dict)

    def of(self, component: str) -> str:
        return self.way if self.only in (None, component) else "eager"

    def mode(self, component: str) -> str:
        return self.modes.get(component, "default")

    @property
    def captures(self) -> bool:
        """True if torch captures CUDA graphs itself."""
        return "reduce-overhead" in self.modes.values()


class CompiledSteps:
    """Encode and decode step at each bucket, compiled when they first run."""

    def __init__(self, model: Any, device: Any, image: Any, how: How) -> None:
        """``image`` holds the pixels of every row, uint8 [height, width, 3]."""
        import torch

        self._model = model
        self._device = device
        self._how = how
        self._steps: dict[tuple[str, int], Callable[[], Any]] = {}
        rows = model.state.slots
        self._pixels = torch.tensor(image, device=device).repeat(rows, 1, 1, 1)
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
        from snapcap.models.regions.table import layer_inputs

        parts = self._parts(component, rows)

        def whole(first: Any, inputs: Any) -> Any:
            hidden = first
            for part, layers in zip(parts, inputs, strict=True):
                for layer in layers:
                    hidden = part(hidden, *layer)
            return hidden

        model = self._model
        inputs = [
            [
                (*self._fixed(*buffers), *weights)
                for buffers, weights in zip(
                    layer_inputs(region, model.state, rows, own), model.weights.of(region), strict=True
                )
            ]
            for region in model.regions.of(component)
        ]
        return partial(self._whole(component, whole, rows), *self._fixed(first), inputs)

    def _parts(self, component: str, rows: int) -> list[Callable[..., Any]]:
        """Returns the functions of the component's regions that a greedy caption runs."""
        import torch

        from snapcap.models.layers.fused import compiled_function

        way = self._how.of(component)
        parts = []
        for region in self._model.regions.of(component):
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
