"""What a process imports and runs: nothing from the folder in which it was started."""

import os
import sys
from pathlib import Path

import pytest
from support.servers.server_process import python

import snapcap
from snapcap.warmup.machine import own_imports
from snapcap.warmup.machine.own_imports import child_environment, python_module
from snapcap.warmup.machine.worker import Worker
from snapcap.warmup.options import FetchJob, S3Options, StoreOptions

ROOT = Path(str(snapcap.__file__)).parent.parent


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which is not that of our packages."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("PYTHONPATH", "", None),
        ("PYTHONPATH", ":", None),
        ("PYTHONPATH", ":/opt/more", "/opt/more"),
        ("PYTHONPATH", "/opt/more:", "/opt/more"),
        ("PYTHONPATH", "lib:./lib:../lib:/opt/more", "/opt/more"),
        ("PATH", ".::/usr/bin:bin", "/usr/bin"),
        ("LD_LIBRARY_PATH", ":/usr/lib/odd", "/usr/lib/odd"),
        ("CPATH", "/opt/include:", "/opt/include"),
        ("LIBRARY_PATH", ":", None),
    ],
)
def test_entries_that_mean_the_working_directory_are_dropped(
    name: str, given: str, kept: str | None, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv(name, given)
    monkeypatch.setattr(own_imports, "_finds_us", lambda path: True)
    assert child_environment().get(name) == kept
    assert child_environment({name: given}).get(name) == kept
    assert child_environment()["PYTHONSAFEPATH"] == "1"


def test_a_child_runs_the_packages_that_its_parent_runs(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they came from, and though others of that name are installed."""
    other = elsewhere / "other"
    (other / "snapcap").mkdir(parents=True)
    (other / "snapcap" / "__init__.py").write_text("raise SystemExit(9)")
    assert child_environment().get("PYTHONPATH") in (os.environ.get("PYTHONPATH"), str(ROOT))
    monkeypatch.setenv("PYTHONPATH", str(other))
    assert child_environment()["PYTHONPATH"] == os.pathsep.join([str(ROOT), str(other)])
    library = os.path.dirname(os.__file__)
    monkeypatch.setattr(sys, "path", [str(ROOT), library])  # a source tree that is not installed
    monkeypatch.delenv("PYTHONPATH")
    assert child_environment()["PYTHONPATH"] == str(ROOT)
    monkeypatch.setattr(sys, "path", [library, str(ROOT)])  # as an installation has it
    assert "PYTHONPATH" not in child_environment()


SHOWS = """
import json, os, sys
sys.path.insert(0, {root!r})
import snapcap
from snapcap.warmup.machine.own_imports import import_only_what_is_installed
sys.path.remove({root!r})
import_only_what_is_installed()
print(json.dumps([sys.path, os.environ.get("PYTHONPATH"), os.environ["PATH"]]))
"""


@pytest.mark.parametrize("path", [None, "", ":", ":/opt/more", "."])
def test_a_process_forgets_its_working_directory(path: str | None, elsewhere: Path) -> None:
    variables = {"PATH": f".:{os.environ['PATH']}", **({} if path is None else {"PYTHONPATH": path})}
    run = python("-c", SHOWS.format(root=str(ROOT)), **variables)
    assert run.returncode == 0, run.stderr
    assert str(elsewhere) not in run.stdout
    assert '""' not in run.stdout.partition("]")[0]
    assert ("/opt/more" in run.stdout) == (path == ":/opt/more")


def test_a_process_may_start_where_the_folder_is_deleted(elsewhere: Path) -> None:
    run = python("-c", f"import os; os.rmdir(os.getcwd())\n{SHOWS.format(root=str(ROOT))}")
    assert run.returncode == 0, run.stderr
    assert str(elsewhere) not in run.stdout


def test_a_process_that_ignores_the_environment_has_children_that_do(elsewhere: Path) -> None:
    code = SHOWS.format(root=str(ROOT)).replace(
        "print(", "from snapcap.warmup.machine.own_imports import child_environment; print("
    )
    code += "print('children', child_environment().get('PYTHONPATH'))"
    run = python("-I", "-c", code, PYTHONPATH="/opt/more")
    assert run.returncode == 0, run.stderr
    assert "/opt/more" not in run.stdout.partition("children")[2]


def test_a_worker_is_not_the_module_of_that_name_here(elsewhere: Path) -> None:
    marker = elsewhere / "ran"
    for name in ("json.py", "snapcap/__init__.py", "snapcap/warmup/artifacts/worker.py", "sitecustomize.py"):
        (elsewhere / name).parent.mkdir(parents=True, exist_ok=True)
        (elsewhere / name).write_text(f"open({str(marker)!r}, 'w')")
    job = FetchJob(StoreOptions(), S3Options(), elsewhere / "none", "demo")
    with Worker("snapcap.warmup.artifacts.worker", job, {"PYTHONPATH": ":"}) as worker:
        assert worker.ask({"do": "finish"}, 60)["result"] == "error"  # it is ours, which has nothing to finish
    assert not marker.exists()


def test_the_command_is_safe_by_itself(elsewhere: Path) -> None:
    (elsewhere / "json.py").write_text("raise SystemExit(9)")
    command = python_module("json.tool")
    assert command[:3] == [sys.executable, "-P", "-m"]
    assert python(*command[1:], "--help").returncode == 0
