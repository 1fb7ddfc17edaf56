"""What each of the two processes imports, and when."""

import json
from typing import Any

import pytest
from support.servers.server_process import python

LIVE = """
import json, sys
import snapcap.service.server.serve, snapcap.service.server.http_process
import snapcap.service.images.decode, snapcap.service.ipc.shared_pixels  # which are for the forks
import uvicorn.loops.auto, uvicorn.protocols.http.httptools_impl  # which the server imports when it runs
print(json.dumps([name for name in sys.modules if name.startswith("snapcap.")]))
"""

HTTP = """
import json, sys
HEAVY = ("torch", "numpy", "fastapi", "pydantic", "opentelemetry", "requests")
HEAVY += ("snapcap.warmup.start.start", "snapcap.warmup.artifacts.manifest")
import snapcap.service.server.serve, snapcap.service.server.http_process
import snapcap.service.api.captioning_apis, snapcap.service.server.monitor
import uvicorn.loops.auto, uvicorn.protocols.http.httptools_impl
from snapcap.service.telemetry.tracing import open_tracing
assert open_tracing({}) is None  # as the start calls it where no OTEL_... variable is set
ours = [name for name in sys.modules if name.startswith("snapcap.")]
print(json.dumps([name for name in ours if name.endswith((".openapi", "_schemas", ".schema_parts"))]
    + [name for name in HEAVY if name in sys.modules]))
"""

EARLY = """
import json, sys
import snapcap.service.server.serve, snapcap.service.server.engine_process
import snapcap.warmup.machine.torch_libraries, snapcap.warmup.machine.torch_libraries
print(json.dumps([name for name in sys.modules if name.startswith("snapcap.")]))
"""

ENGINE = """
import json, sys
import snapcap.service.server.serve
import snapcap.service.server.engine_process, snapcap.service.engine.device_thread
import snapcap.models.config, snapcap.models.processing.transform
web = ("fastapi", "pydantic", "starlette", "uvicorn", "asyncio", "prometheus_client", "PIL", "tokenizers", "torch")
print(json.dumps([name for name in web if name in sys.modules]))
"""

DECODING = """
import json, sys
import snapcap.service.server.serve
import snapcap.service.images.decode, snapcap.service.images.parent, snapcap.models.processing.image
other = ("fastapi", "pydantic", "starlette", "uvicorn", "asyncio", "prometheus_client", "tokenizers", "torch")
other += ("numpy",)
print(json.dumps([name for name in other if name in sys.modules]))
"""


def imports(program: str) -> Any:
    """What a program prints."""
    run = python("-c", program)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_probe_waits_for_no_api_that_captions() -> None:
    """Nor for what follows the other processes, which is dozens of modules more."""
    modules = imports(LIVE)
    apis = ("answers", "caption", "conversation", "huggingface", "ollama", "openai", "responses", "v2", "openapi")
    unwanted = (*(f"snapcap.service.api.{api}" for api in apis), "snapcap.service.server.monitor")
    assert [name for name in modules if name.startswith(unwanted)] == []
    assert 40 < len(modules) < 92


def test_torchs_libraries_wait_for_nothing_that_needs_them() -> None:
    """In the engine process, which loads them before all that follows: 61 modules came before them once."""
    modules = imports(EARLY)
    assert [name for name in modules if name.startswith(("snapcap.warmup.start", "snapcap.warmup.artifacts"))] == []
    assert 30 < len(modules) < 61


def test_neither_torch_nor_what_only_documents_is_imported_to_answer() -> None:
    assert imports(HTTP) == []


@pytest.mark.parametrize("program", [ENGINE, DECODING], ids=["engine", "decoding"])
def test_the_other_processes_have_no_part_of_what_answers(program: str) -> None:
    assert imports(program) == []
