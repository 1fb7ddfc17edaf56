"""Marks the phases of a measured process's start, and passes them and other results to its parent.

The module imports nothing slow, because the first mark of a child comes before its imports. The clock is
CLOCK_MONOTONIC, which all processes of a machine share, so the parent can count the marks from the moment it
spawned the child. The module is also a program, the floor of every start: it imports torch, opens the
device and loads the weights, and runs no model.

    python -m snapcap.benchmarks.harness.marks cuda FOLDER

The weights are read in the plainest way: from safetensors to the device in the served precision, one tensor after
the other. Without the checkpoint's folder, the program ends after the import of torch.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from snapcap.benchmarks.harness.processes import peak_host_bytes

Marks = list[tuple[str, float]]
RESULT = "bench-result "
STEPS = 20  # calls of a series
_marks: Marks = []


def mark(name: str) -> None:
    """Notes that the phase ``name``, which began with the mark before, has ended."""
    _marks.append((name, time.monotonic()))


def result(value: Mapping[str, Any]) -> None:
    """Prints the marks so far and other results for the parent."""
    print(RESULT + json.dumps([_marks, value]), flush=True)


def series_ms(run: Callable[[], object], rewind: Callable[[], object], wait: Callable[[], object]) -> float:
    """Returns the milliseconds of one call: the mean of a series, the best of three series after one that does not
    count.

    A series has as many calls as a caption has steps, so no row runs out of its cache.
    """
    best = float("inf")
    for stretch in range(4):
        rewind()
        wait()
        began = time.perf_counter()
        for _ in range(STEPS):
            run()
        wait()
        if stretch:
            best = min(best, (time.perf_counter() - began) / STEPS * 1000)
    return best


def memory() -> dict[str, float]:
    """Returns this process's peak memory on the host, and the memory in use on its GPU by all processes, in MiB."""
    host, torch = peak_host_bytes(os.getpid()), sys.modules.get("torch")
    found = {} if host is None else {"peak_host_mib": host / (1 << 20)}
    if torch is not None and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        found["device_used_mib"] = (total - free) / (1 << 20)
    return found


def main(device: str, *folders: str) -> None:
    import torch

    mark("import_torch")
    for folder in folders:
        torch.zeros(1, device=device)
        mark("device_init")
        from safetensors.torch import load_file

        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        tensors = load_file(Path(folder) / "model.safetensors")
        weights = [tensor.to(device=device, dtype=dtype) for tensor in tensors.values()]
        if device == "cuda":
            torch.cuda.synchronize()
        mark("load_weights")
        del weights
    result(memory())


if __name__ == "__main__":
    main(*sys.argv[1:])
