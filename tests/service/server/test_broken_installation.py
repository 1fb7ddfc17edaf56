"""A module of the program that cannot be imported ends the start: a server that is alive for ever helps nobody."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.servers.server_process import clean_environment

ROOT = Path(__file__).parents[3]
# With the processes that decode, which import parts of their own.
OPTIONS = ("--port", "0", "--backend", "eager", "--cache-dir", "cache", "--decode-processes", "1")


@pytest.mark.parametrize(
    "module",
    [
        "warmup/start/start.py",
        "models/regions/table.py",
        "warmup/runtime/runner.py",
        "models/processing/image.py",
        "service/api/v2.py",  # which is imported once /livez answers
    ],
)
def test_a_module_that_cannot_be_imported_fails_the_start_with_its_name(module: str, tmp_path: Path) -> None:
    run = serve_with(tmp_path, module, "from snapcap.warmup import no_such_module")
    assert run.returncode == 3, run.stderr
    assert "ImportError: cannot import name 'no_such_module' from 'snapcap.warmup'" in run.stderr
    assert "Traceback" in run.stderr


def test_a_module_that_ends_the_interpreter_fails_the_start(tmp_path: Path) -> None:
    run = serve_with(tmp_path, "service/api/v2.py", "raise SystemExit('gone')")
    assert (run.returncode, "SystemExit: gone" in run.stderr) == (3, True), run.stderr


def test_an_import_that_hangs_ends_the_start(tmp_path: Path) -> None:
    run = serve_with(tmp_path, "service/api/v2.py", "import time; time.sleep(3600)", "--start-timeout", "3")
    assert run.returncode == 3, run.stderr
    assert "the imports of the start have not ended after 3 s (--start-timeout)" in run.stderr


def serve_with(tmp_path: Path, module: str, line: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A server from a copy of the tree whose module has one more line."""
    ignored = shutil.ignore_patterns("results")
    shutil.copytree(ROOT / "snapcap", tmp_path / "snapcap", ignore=ignored)
    with (tmp_path / "snapcap" / module).open("a") as file:
        file.write(f"\n{line}\n")
    return subprocess.run(
        [sys.executable, "-m", "snapcap", "serve", *OPTIONS, *options],
        env=clean_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
