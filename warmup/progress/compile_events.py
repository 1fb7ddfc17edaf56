"""Counts what this process has of torch's Python module and has compiled with it. Imports nothing."""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple


class CacheCounts(NamedTuple):
    """Lookups in torch's compile caches, of whole graphs (AOTAutograd) and of their code (Inductor).

    ``bypasses`` are graphs that torch cannot cache at all.
    """

    hits: int = 0
    misses: int = 0
    bypasses: int = 0


class CompilerCounts(NamedTuple):
    """Graphs compiled, lookups, and torch's Python modules: 0 where packages run without them."""

    graphs: int = 0
    caches: CacheCounts = CacheCounts()
    modules: int = 0


def compiler_counts() -> CompilerCounts:
    """Returns the compiler's counts in this process."""
    return CompilerCounts(compiled_graphs(), cache_counts(), torch_modules())


def torch_modules() -> int:
    """Modules named torch, or below it, that have been imported."""
    return sum(name == "torch" or name.startswith("torch.") for name in list(sys.modules))


def compiled_graphs() -> int:
    """Graphs that Dynamo has compiled; 0 where it was never imported, which is every aot and eager server."""
    return int(_counters().get("stats", {}).get("unique_graphs", 0))


def cache_counts() -> CacheCounts:
    """All zero where nothing was compiled."""
    counters = _counters()
    caches = (("aot_autograd", "autograd_cache"), ("inductor", "fxgraph_cache"))
    return CacheCounts(
        *(
            sum(int(counters.get(group, {}).get(f"{cache}_{result}", 0)) for group, cache in caches)
            for result in ("hit", "miss", "bypass")
        )
    )


def _counters() -> Mapping[str, Mapping[str, Any]]:
    utils = sys.modules.get("torch._dynamo.utils")
    return {} if utils is None else utils.counters
