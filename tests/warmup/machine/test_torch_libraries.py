"""What is imported while torch's libraries are loaded: nothing that waits for the linker; how threads wait."""

import json

import pytest
from support.servers.server_process import python

PROGRAM = """
import json, sys
import snapcap.service.server.processes
import snapcap.service.ipc.framing
from snapcap.warmup.machine.torch_libraries import import_compiled

def compiled():
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    return {name for name, file in files.items() if file.endswith(".so")}

import_compiled()
from snapcap.warmup.machine import torch_libraries
before = compiled()
looked = []  # for functions, which waits for the linker as well
sys.addaudithook(lambda event, of: looked.append(str(of)) if event.startswith("ctypes.dl") else None)
import snapcap.service.config.settings  # which come as a pickle
import snapcap.service.ipc.shared_pixels
import snapcap.service.telemetry.logs
import snapcap.service.server.engine_process
import snapcap.service.engine.device_thread
import snapcap.warmup.runtime.aoti.native
import snapcap.warmup.runtime.aoti.native
import snapcap.warmup.runtime.devices
import snapcap.warmup.runtime.runner
import snapcap.warmup.start.warmer
print(json.dumps([sorted(compiled() - before), looked, "torch" in sys.modules]))
"""


def test_what_a_start_imports_meanwhile_does_not_wait_for_the_linker() -> None:
    run = python("-c", PROGRAM)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [[], [], False]


WAITING = """
import os
from snapcap.warmup.machine.torch_libraries import load_torch_libraries
load_torch_libraries()
print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("given", "used"),
    [({}, "PASSIVE 1000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"), ({"GOMP_SPINCOUNT": "7"}, "None 7")],
)
def test_waiting_threads_sleep_soon_unless_the_environment_says_otherwise(
    given: dict[str, str], used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):  # this process may have them by now
        monkeypatch.delenv(name, raising=False)
    run = python("-c", WAITING, **given)
    assert run.stdout.strip() == used, run.stderr
