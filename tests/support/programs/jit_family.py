"""Captions images by a family's random model on the jit backend, in its own process; prints tokens as JSON.

python -m support.programs.jit_family FAMILY FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from support.parity import device_cases
from support.parity.device_cases import PROMPT, STEPS, open_model, open_runner, plan_of, steps_with_logits

from snapcap.warmup.artifacts.fetch import Fetched
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.plan.plan import Artifacts
from snapcap.warmup.progress.status import StartupStatus, compiled_graphs
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.slot_request import SlotRequest
from snapcap.warmup.start.jit import open_compiler


def main() -> None:
    family, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_grad_enabled(False)
    captioner = getattr(device_cases, family)(folder / "model")
    images = captioner.images(2)
    plan = plan_of(torch.device("cpu"), "float32", (2,))
    options = StartOptions(ModelOptions(cache_dir=folder / "cache"), ComputeOptions(backend="jit"))
    out = {}
    with open_compiler(options, Timeline.since_exec(), StartupStatus()) as jit:
        assert jit is not None
        backend = jit.backend(plan, Artifacts("0" * 64, {"kind": "jit"}, Fetched("miss", "none")))
        runner = open_runner(open_model(captioner, plan), plan, backend)
        out["graphs"] = compiled_graphs()
        prefilled = len(PROMPT) if captioner.config.decoder.reads_prompt else 0
        for name, rows in (
            ("alone", [SlotRequest()] * 2),
            ("prompt", [SlotRequest(PROMPT, prefilled=prefilled)] * 2),
        ):
            runner.encode(plan.table.largest, images, 0, rows)
            tokens, _ = steps_with_logits(runner, plan.table.largest, rows, STEPS - rows[0].prefilled)
            expected, _ = captioner.generate(captioner.model, images, STEPS, tuple(rows[0].prompt))
            out[name] = [tokens, [row[rows[0].prefilled :] for row in expected]]
        out["graphs_after"] = compiled_graphs()
        jit.settle()
    print(json.dumps(out))


if __name__ == "__main__":
    main()
