"""What is imported before the server listens, and what beside it."""

import json
import subprocess
import sys

from support.server_process import clean_environment

PROGRAM = """
import json, sys
import service.serve
from service import web_imports

def compiled():
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return {name for name, file in files.items() if file.endswith((".so", ".pyd"))}

started = []
web_imports.load_torch_libraries = lambda: started.append((compiled(), "fastapi" in sys.modules))
web_imports.import_web()
from pydantic import BaseModel
from service.assembly import assemble, create_app, make_server
import uvicorn.loops.auto, uvicorn.protocols.http.httptools_impl  # which the server imports when it runs
(before, fastapi), = started
print(json.dumps({
    "fastapi": fastapi,
    "later": sorted(compiled() - before),
    "deferred": BaseModel.model_config.get("defer_build"),
    "documentation": [name for name in sys.modules if name.startswith("service.schemas")],
    "heavy": [name for name in ("torch", "numpy", "warmup.startup", "warmup.manifest") if name in sys.modules],
}))
"""


def test_nothing_that_the_linker_must_load_is_imported_beside_torchs_libraries() -> None:
    """It would wait for them, and every other thread with it."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {
        "fastapi": False,
        "later": [],
        "deferred": None,
        "documentation": [],
        "heavy": [],
    }
