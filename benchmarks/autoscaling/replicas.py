"""Reads what was measured of servers on two CPUs with the demo model: how they start, and what they serve.

The numbers are those of `benchmarks/results/`, which the bench wrote; nothing here is typed in but what others
have published, and that is marked as such.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from snapcap.benchmarks.autoscaling.fleet import Replica
from snapcap.benchmarks.harness.common import ROOT

RESULTS = ROOT / "benchmarks" / "results"
# Clients at once when captions a second were measured; each server has its best rate by then.
CLIENTS = 16
# vLLM, 0.5 B parameters on a GPU, with a warm compile cache (vllm-project/vllm#40323). Only its start is published:
# what it would serve here is taken to be what snapcap does, so that nothing but the start differs.
VLLM_START_S = 39.5


def measured(results: Path = RESULTS) -> list[Replica]:
    """The servers of the comparison, the fastest start first.

    Raises:
        KeyError, OSError, ValueError: a result is not there, or not as the bench writes it.
    """
    starts = _read(results / "cpu-startup.json")["cases"]
    beside = _rates(_read(results / "cpu-onnxruntime-throughput.json"))
    others = _rates(_read(results / "cpu-throughput.json"))
    slow = max(("transformers-eager", "transformers-1-thread"), key=lambda name: others[name])

    def replica(title: str, case: str, rate: float) -> Replica:
        """Of starts, the median until READY, and that of a lone caption later on."""
        medians = starts[case]["medians"]
        return Replica(title, medians["ready"], medians["steady_ms"] / 1000, rate, CLIENTS)

    snapcap = replica("snapcap", "aot", beside["aot"])
    servers = [
        replica("FastAPI + ONNX Runtime", "onnxruntime", beside["onnxruntime"]),
        snapcap,
        replica("FastAPI + transformers", "transformers-eager", others[slow]),
        Replica("snapcap, if it started as vLLM (published)", VLLM_START_S, snapcap.lone, snapcap.rate, CLIENTS),
    ]
    return sorted(servers, key=lambda each: each.start)


def _rates(result: Mapping[str, Any]) -> dict[str, float]:
    """Captions a second over HTTP, by case."""
    return {name: median(samples["captions_per_s"]) for name, samples in result["samples"].items()}


def _read(file: Path) -> dict[str, Any]:
    value = json.loads(file.read_text())
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} is no result of the bench")
    return value
