"""What is imported before the server listens, and what beside it."""

import json
import subprocess
import sys
from typing import Any

from support.server_process import clean_environment

PROGRAM = """
import json, sys
import service.serve
from service import web_imports

def compiled():
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return {name for name, file in files.items() if file.endswith((".so", ".pyd"))}

started = []
web_imports.available_cpus = lambda: int(sys.argv[1])
web_imports.load_torch_libraries = lambda: started.append((compiled(), "fastapi" in sys.modules))
web_imports.import_web()
from pydantic import BaseModel
from service.assembly import assemble, create_app, make_server
import uvicorn.loops.auto, uvicorn.protocols.http.httptools_impl  # which the server imports when it runs
before, fastapi = started[0] if started else (set(), None)
print(json.dumps({
    "started": len(started),
    "fastapi": fastapi,
    "later": sorted(compiled() - before),
    "deferred": BaseModel.model_config.get("defer_build"),
    "documentation": [name for name in sys.modules if name.startswith("service.schemas")],
    "heavy": [name for name in ("torch", "numpy", "warmup.startup", "warmup.manifest") if name in sys.modules],
}))
"""


def imports(cpus: int) -> dict[str, Any]:
    """What `PROGRAM` prints on a machine with so many CPUs."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cpus)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report: dict[str, Any] = json.loads(run.stdout)
    return report


def test_nothing_that_the_linker_must_load_is_imported_beside_torchs_libraries() -> None:
    """It would wait for them, and every other thread with it."""
    report = imports(cpus=2)
    assert (report["started"], report["fastapi"], report["later"]) == (1, False, [])


def test_on_one_cpu_torchs_libraries_wait_until_livez_answers() -> None:
    report = imports(cpus=1)
    assert (report["started"], report["heavy"]) == (0, [])


def test_neither_torch_nor_what_only_documents_is_imported_to_answer() -> None:
    report = imports(cpus=2)
    assert (report["heavy"], report["documentation"], report["deferred"]) == ([], [], None)
