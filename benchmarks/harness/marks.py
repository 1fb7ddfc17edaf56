"""Marks the phases of a measured process's start: it prints a line when a phase ends, and its parent reads them.

The module imports nothing slow, because the first mark of a child comes before its imports. The clock is
CLOCK_MONOTONIC, which all processes of a machine share, so the parent can count the marks from the moment it
spawned the child.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from snapcap.benchmarks.harness.processes import peak_host_bytes

_MARK = "bench-mark "
_RESULT = "bench-result "


def mark(name: str) -> None:
    """Prints that the phase ``name``, which began with the mark before, has ended."""
    print(f"{_MARK}{time.monotonic():.6f} {name}", flush=True)


def result(value: Mapping[str, Any]) -> None:
    """Prints other results for the parent."""
    print(_RESULT + json.dumps(value), flush=True)


def memory() -> dict[str, float]:
    """Returns this process's peak memory on the host, and the memory in use on its GPU by all processes, in MiB."""
    host, torch = peak_host_bytes(os.getpid()), sys.modules.get("torch")
    found = {} if host is None else {"peak_host_mib": host / (1 << 20)}
    if torch is not None and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        found["device_used_mib"] = (total - free) / (1 << 20)
    return found


def read_marks(lines: Iterable[str]) -> list[tuple[float, str]]:
    """Returns the marks in a child's output in order: (moment on ``time.monotonic``, name)."""
    found = []
    for line in lines:
        if line.startswith(_MARK):
            moment, _, name = line.removeprefix(_MARK).rstrip().partition(" ")
            found.append((float(moment), name))
    return found


def read_result(lines: Iterable[str]) -> dict[str, Any]:
    """Returns the merged results in a child's output."""
    found: dict[str, Any] = {}
    for line in lines:
        if line.startswith(_RESULT):
            found |= json.loads(line.removeprefix(_RESULT))
    return found
