"""Starts a model in a process of its own, and checks which modules it leaves imported."""

import json
from pathlib import Path

from support.servers.server_process import python

_START = """
import json, subprocess, sys
from pathlib import Path
def refuse(*a, **k): raise AssertionError(f"a process was started: {a}")
subprocess.Popen.__init__ = refuse
from snapcap.warmup.options import ComputeOptions, ModelOptions, StartOptions
from snapcap.warmup.start.start import load
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
cache, status = Path(sys.argv[1]), StartupStatus()
options = StartOptions(
    ModelOptions(cache_dir=cache), ComputeOptions(device=sys.argv[2], backend="aot", buckets=(1, 4), strict=True)
)
load(options, Timeline.since_exec(), status)
print(json.dumps([status.backend, sorted(sys.modules)]))
"""


def assert_starts_without_a_compiler(cache: Path, device: str) -> None:
    """From the demo model's artifacts for buckets 1 and 4, on aot: without a process, and without an import that a
    server must not wait for."""
    run = python("-c", _START, str(cache), device)
    assert run.returncode == 0, run.stderr
    backend, modules = json.loads(run.stdout.splitlines()[-1])
    assert backend == "aot"
    unwanted = ("torch._dynamo", "torch._inductor.compile_fx", "transformers", "triton", "boto3")
    assert [name for name in modules if name.startswith(unwanted)] == []
