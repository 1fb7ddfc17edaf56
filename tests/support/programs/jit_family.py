"""Captions images by random models of families on the jit backend, in its own process; prints tokens as JSON.

python -m support.programs.jit_family FOLDER FAMILY...

Dynamo traces and guards every graph as it does for Inductor, and the graphs run as they were traced.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from support.parity import device_cases
from support.parity.device_cases import PROMPT, open_model, open_runner, plan_of, steps_with_logits

from snapcap.models.layers.weights import RegionFunction
from snapcap.warmup.artifacts.fetch import Artifacts, Fetched
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.progress.status import StartupStatus, compiled_graphs
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.slot_request import SlotRequest
from snapcap.warmup.start.jit import open_compiler

# Each step runs the same graphs, and some models of transformers compute all tokens again. The random LLaVA says
# one token for 14 steps.
STEPS = dict.fromkeys(("blip", "git", "smolvlm", "florence2", "qwen3_vl"), 8) | {"llava": 20}
_compile = torch.compile


def run_traced(function: RegionFunction, fullgraph: bool, dynamic: bool, options: Any) -> RegionFunction:
    """Stands for `torch.compile`, and has no graph compiled."""
    traced: RegionFunction = _compile(function, fullgraph=fullgraph, dynamic=dynamic, backend="eager")
    return traced


def run(family: str, folder: Path) -> dict[str, Any]:
    """Returns tokens and what transformers generates, by the kind of request, and how many graphs there were after
    the warm-up and at the end."""
    captioner, steps = getattr(device_cases, family)(folder / "model"), STEPS[family]
    pictures = captioner.images(3)
    plan = plan_of(torch.device("cpu"), "float32", (2,))
    options = StartOptions(ModelOptions(cache_dir=folder / "cache"), ComputeOptions(backend="jit"))
    out: dict[str, Any] = {}
    before = compiled_graphs()
    with open_compiler(options, Timeline.since_exec(), StartupStatus()) as jit:
        assert jit is not None
        backend = jit.backend(plan, Artifacts("0" * 64, {"kind": "jit"}, Fetched("miss", "none")))
        runner = open_runner(open_model(captioner, plan), plan, backend)
        out["graphs"] = compiled_graphs() - before
        prefilled = len(PROMPT) if captioner.config.decoder.reads_prompt else 0
        # Pictures of any shape run with another number of tokens in each kind of request.
        for name, images, rows in (
            ("alone", pictures[:2], [SlotRequest()] * 2),
            ("prompt", pictures[::2], [SlotRequest(PROMPT, prefilled=prefilled)] * 2),
        ):
            runner.encode(plan.table.largest, images, 0, rows)
            tokens, _ = steps_with_logits(runner, plan.table.largest, rows, steps - rows[0].prefilled)
            expected, _ = captioner.generate(captioner.model, images, steps, tuple(rows[0].prompt))
            out[name] = [tokens, [row[rows[0].prefilled :] for row in expected]]
        out["graphs_after"] = compiled_graphs() - before
        jit.settle()
    torch.compiler.set_stance("default")
    return out


def main() -> None:
    folder, families = Path(sys.argv[1]), sys.argv[2:]
    torch.compile = run_traced  # type: ignore[assignment]
    torch.set_grad_enabled(False)
    results = {}
    for family in families:
        (folder / family / "model").mkdir(parents=True)
        results[family] = run(family, folder / family)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
