"""Compiles two small regions as the jit backend does, in a process of its own; prints what happened as JSON.

python -m support.checkpoints.jit_regions FOLDER [REDIS_URL]
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _record_modes() -> list[bool]:
    """Returns a list to which each graph that Inductor lowers from now on adds whether Inductor autotunes. A second
    graph of the same code object is an error."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    dynamo.recompile_limit = 1
    autotuned: list[bool] = []
    lower = GraphLowering.run

    def recorded(self: GraphLowering, *args: Any) -> Any:
        autotuned.append(config.max_autotune)
        return lower(self, *args)

    GraphLowering.run = recorded
    return autotuned


def main() -> None:
    folder, remote_cache = Path(sys.argv[1]), "".join(sys.argv[2:])
    import torch

    from snapcap.models.regions.table import Region
    from snapcap.warmup.artifacts.fetch import Artifacts, Fetched
    from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions, StoreOptions
    from snapcap.warmup.plan.plan import Bucket, Plan
    from snapcap.warmup.progress.status import StartupStatus, cache_counts, compiled_graphs
    from snapcap.warmup.progress.timeline import Timeline
    from snapcap.warmup.start.jit import open_compiler

    torch.set_grad_enabled(False)
    kept, status = _Kept(), StartupStatus()
    logging.getLogger("snapcap.jit").addHandler(kept)
    options = StartOptions(
        ModelOptions(cache_dir=folder), ComputeOptions(backend="jit"), store=StoreOptions(remote_cache=remote_cache)
    )
    plan = Plan("cpu", "float32", (2, 3), 8, 1, encoder_mode="default", decoder_mode="max-autotune")
    out: dict[str, Any] = {}

    def scaled(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden * weight + 1)

    with open_compiler(options, Timeline.since_exec(), status) as jit:
        assert jit is not None
        out["autotuned"] = _record_modes()
        backend = jit.backend(plan, Artifacts("0" * 64, {"kind": "jit"}, Fetched("miss", "none")))
        run = {}
        for component, size in (("encoder", 2), ("encoder", 3), ("decoder", 2)):
            region = Region(f"{component}_block", component, lambda: scaled, ("hidden",), layers=2)
            name = f"{component}_{size}"
            run[name] = backend.callable(region, Bucket(size))
            for _layer in range(region.layers):  # each layer has other weights
                inputs = torch.randn(size, 8), torch.randn(8)
                torch.testing.assert_close(run[name](*inputs), scaled(*inputs))
        out["graphs"], out["counts"] = compiled_graphs(), cache_counts()._asdict()
        jit.settle()
    other = torch.randn(5, 8), torch.randn(8)
    eager = [run["encoder_2"](*other) for _ in range(3)]
    torch.testing.assert_close(eager, [scaled(*other)] * 3)
    out["fallbacks"] = [[*labels, count] for labels, count in status.counts("eager_fallbacks").items()]
    out["messages"] = kept.messages
    torch.compiler.set_stance("fail_on_recompile")
    run["encoder_2"](torch.randn(2, 8), torch.randn(8))
    try:
        run["encoder_2"](*other)
    except RuntimeError as error:
        out["failed"] = str(error).splitlines()[0]
    out["graphs_after"] = compiled_graphs()
    print(json.dumps(out))


if __name__ == "__main__":
    main()
