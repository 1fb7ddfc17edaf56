"""The one-way rule, service → warmup → models, and what a server must never import."""

import ast
import json
from pathlib import Path

import pytest
from support.server_process import python

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "models": {"warmup", "service", "benchmarks", "boto3", "fastapi", "starlette", "uvicorn", "prometheus_client"},
    "warmup": {"service", "benchmarks", "fastapi", "starlette", "uvicorn", "prometheus_client"},
    "service": {"transformers"},
}


def imported(source: Path) -> set[str]:
    """Top-level names of every module a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 10
    wrong = {str(file.relative_to(ROOT)): imported(file) & FORBIDDEN[package] for file in files}
    assert {file: names for file, names in wrong.items() if names} == {}


def test_files_stay_small() -> None:
    sizes = {
        str(file.relative_to(ROOT)): len(file.read_text().splitlines())
        for package in FORBIDDEN
        for file in (ROOT / package).rglob("*.py")
    }
    assert {file: lines for file, lines in sizes.items() if lines > 300} == {}


def test_a_caption_on_eager_imports_no_compiler_and_no_transformers() -> None:
    program = """
import json, sys
from pathlib import Path
from snapcap.warmup.options import StartOptions, StoreOptions
from snapcap.warmup.start.start import load
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
folder = Path(sys.argv[1])
load(StartOptions("demo", folder, StoreOptions(folder), backend="eager"), Timeline.since_exec(), StartupStatus())
print(json.dumps(sorted(sys.modules)))
"""
    run = python("-c", program, "cache")
    assert run.returncode == 0, run.stderr
    modules = json.loads(run.stdout.splitlines()[-1])
    assert "torch" in modules
    assert [name for name in modules if name.startswith(("torch._dynamo", "transformers", "boto3"))] == []
    assert "torch._inductor.compile_fx" not in modules
