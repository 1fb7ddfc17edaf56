"""What each of the two processes imports, and when."""

import json
from typing import Any

import pytest
from support.server_process import python

HTTP = """
import json, sys
HEAVY = ("torch", "numpy", "snapcap.warmup.start.start", "snapcap.warmup.artifacts.manifest")
import snapcap.service.server.serve
from snapcap.service.server import fastapi_import as web_imports

web_imports.import_web()
from pydantic import BaseModel
from snapcap.service.server.http_process import assemble, create_app, make_server
from snapcap.service.server.engine_process.monitor import follow
import uvicorn.loops.auto, uvicorn.protocols.http.httptools_impl  # which the server imports when it runs
print(json.dumps({
    "deferred": BaseModel.model_config.get("defer_build"),
    "documentation": [name for name in sys.modules if name.startswith("snapcap.service.api.schemas")],
    "heavy": [name for name in HEAVY if name in sys.modules],
}))
"""

ENGINE = """
import json, sys
import snapcap.service.server.serve
import snapcap.service.server.engine_process.run, snapcap.service.engine.device_thread
import snapcap.models.config, snapcap.models.processing.transform
web = ("fastapi", "pydantic", "starlette", "uvicorn", "asyncio", "prometheus_client", "PIL", "tokenizers", "torch")
print(json.dumps([name for name in web if name in sys.modules]))
"""

DECODING = """
import json, sys
import snapcap.service.server.serve
import snapcap.service.images.processes.supervisor, snapcap.models.processing.image
other = ("fastapi", "pydantic", "starlette", "uvicorn", "asyncio", "prometheus_client", "tokenizers", "torch")
print(json.dumps([name for name in other if name in sys.modules]))
"""


def imports(program: str) -> Any:
    """What a program prints."""
    run = python("-c", program)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_neither_torch_nor_what_only_documents_is_imported_to_answer() -> None:
    report = imports(HTTP)
    assert (report["heavy"], report["documentation"], report["deferred"]) == ([], [], None)


@pytest.mark.parametrize("program", [ENGINE, DECODING], ids=["engine", "decoding"])
def test_the_other_processes_have_no_part_of_what_answers(program: str) -> None:
    assert imports(program) == []
