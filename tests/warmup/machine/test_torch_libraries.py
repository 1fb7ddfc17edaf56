"""torch's libraries are there before the module is, and the module takes them as they are."""

import json
import subprocess
import sys

import pytest
from support.servers.server_process import clean_environment

PROGRAM = """
import json, os, sys, threading
from snapcap.warmup.machine.torch_libraries import load_torch_libraries

def mapped():
    with open("/proc/self/maps") as maps:
        return {line.split("/")[-1].strip() for line in maps if "/torch/lib/" in line}

before = mapped()
threads = [threading.Thread(target=load_torch_libraries) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
loaded, modules = mapped(), [name for name in ("torch", "numpy") if name in sys.modules]
import torch
print(json.dumps([len(before), sorted(loaded), modules, os.environ["OMP_WAIT_POLICY"], torch.ones(3).sum().item()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's maps")
def test_libraries_load_without_the_module_and_it_works_with_them() -> None:
    environment = clean_environment()
    environment.pop("OMP_WAIT_POLICY", None)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    before, loaded, modules, wait_policy, total = json.loads(run.stdout)
    assert before == 0
    assert {"libtorch.so", "libtorch_cpu.so", "libc10.so"} <= set(loaded)
    assert "libtorch_python.so" not in loaded, "it uses Python, whose lock is not held"
    assert modules == []
    assert (wait_policy, total) == ("PASSIVE", 3.0)


def test_without_torch_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    from snapcap.warmup.machine import torch_libraries

    monkeypatch.setattr(torch_libraries, "find_spec", lambda name: None)
    torch_libraries.load_torch_libraries()
