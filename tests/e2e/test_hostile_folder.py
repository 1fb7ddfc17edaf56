"""Commands that are started in a folder to which somebody else may write: none of its code is run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints.build_folders import nearly_built
from support.checkpoints.compilers import own_compiler
from support.servers.server_process import ServerProcess, clean_environment

# What Python itself, or the command, imports first; and what we import later.
FIRST = (
    "snapcap/__init__.py",
    "warmup/__init__.py",
    "models/__init__.py",
    "service/__init__.py",
    "json.py",
    "subprocess.py",
    "sitecustomize.py",
)
LATER = ("torch.py", "numpy/__init__.py", "triton/__init__.py", "setuptools/__init__.py", "boto3.py")
PROGRAMS = ("g++", "gcc", "c++", "as", "ld", "nice", "openssl", "python", "sh")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose every file writes to ``ran`` beside it, when it is run."""
    folder, ran = tmp_path / "photos", tmp_path / "ran"
    code = f"open({str(ran)!r}, 'a').write(__file__ + '\\n')\nraise ImportError('hostile')\n"
    for name in (*FIRST, *LATER):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code)
    for name in PROGRAMS:
        (folder / name).write_text(f'#!/bin/bash\necho "$0" >>{ran}\nexit 1\n')
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def command() -> str:
    """What an installation puts into PATH."""
    found = shutil.which("snapcap", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("snapcap is not installed beside this interpreter")
    return found


class Server(ServerProcess):
    """Started by the installed command in a folder."""

    def __init__(self, command: str, folder: Path, *arguments: str, **environment: str) -> None:
        super().__init__(*arguments, **environment)
        self._command, self._folder = command, folder

    def __enter__(self) -> "Server":
        options = ("--host", "127.0.0.1", "--port", str(self.port), *self._arguments)
        self.process = subprocess.Popen(
            [self._command, "serve", *options],
            env=clean_environment(**self._environment),
            stderr=self._log,
            cwd=self._folder,
        )
        return self


def paths() -> dict[str, str]:
    """With an empty entry, which is the working directory, before all others; and with a compiler that looks for
    programs and headers itself."""
    return {"PATH": f":{own_compiler()['PATH']}", "LIBRARY_PATH": ":", "CPATH": ":"}


@pytest.mark.timeout(600)
def test_a_build_runs_nothing_of_the_folder_it_is_started_in(
    command: str, hostile: Path, built_cache: Path, tmp_path: Path
) -> None:
    nearly_built(built_cache, tmp_path / "store")
    options = ("--cache-dir", str(tmp_path), "--buckets", "1,4", "--build-workers", "1")
    run = subprocess.run(
        [command, "build", *options],
        cwd=hostile,
        env=clean_environment(**paths()),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert run.returncode == 0, run.stderr
    assert "published: " in run.stderr


@pytest.mark.timeout(600)
def test_a_server_that_builds_runs_nothing_of_the_folder_it_is_started_in(
    command: str, hostile: Path, built_cache: Path, tmp_path: Path, samples: dict[Path, str]
) -> None:
    path, caption = next(iter(samples.items()))
    nearly_built(built_cache, tmp_path / "store")
    options = ("--cache-dir", str(tmp_path), "--buckets", "1,4", "--drain-delay", "0")
    with Server(command, hostile, *options, **paths()) as server:
        assert server.wait_ready().startup()["tier"] == "eager"
        server.wait_for(lambda: (server.startup()["build"] or {}).get("state") in ("published", "failed"), 500)
        assert server.startup()["build"]["state"] == "published", server.startup()["build"]
        reply = server.caption(path)
        assert (reply["caption"], reply["backend"]) == (caption, "aot")
        server.terminate()
        assert server.process.wait(60) == 0
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_the_module_that_is_the_command_imports_nothing_late_from_the_folder(
    hostile: Path, built_cache: Path, tmp_path: Path
) -> None:
    """`python -m snapcap` has Python put the folder first, and run what is in the way of its own first imports;
    what follows is ours to choose, as torch and numpy are."""
    for name in FIRST:
        (hostile / name).unlink()
    for name in ("snapcap", "warmup", "models", "service"):
        (hostile / name).rmdir()
    options = ("--cache-dir", str(built_cache), "--buckets", "1,4")
    run = subprocess.run(
        [sys.executable, "-m", "snapcap", "build", *options],
        cwd=hostile,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
