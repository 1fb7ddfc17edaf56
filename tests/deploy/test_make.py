"""What make installs, and on which machines it can: the tests' own has one Python, and a torch of its own."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.lowest import constraints
from support.servers.server_process import clean_environment

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
# The first of each minor version: what the last one can install, an earlier one may not.
PYTHONS = ("3.11.0", "3.12.0", "3.13.0", "3.14.0")
INTEL, ARM = "x86_64-manylinux_2_28", "aarch64-manylinux_2_28"
UNREACHED = 2  # uv's exit status where it cannot ask an index; 1 where there is no solution


def make(*arguments: str, path: str = os.environ["PATH"]) -> "subprocess.CompletedProcess[str]":
    environment = clean_environment(PATH=path)
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Arguments of every `pip install` of an empty environment, by the commands that make would run."""
    folder = tmp_path_factory.mktemp("environment")
    shown = make("-n", f"VENV={folder}", f"PYTHON={sys.executable}", "serve", "docs", "setup")
    assert shown.returncode == 0, shown.stderr
    commands = [
        line.split(" 2>")[0] for line in shown.stdout.splitlines() if " -m pip " in line and "[ " not in line
    ]
    arguments = [shlex.split(command.lstrip("@").split(" install -q ")[1]) for command in commands]
    assert [sum(last == each[-1] for each in arguments) for last in ("torch", ".", ".[docs]", ".[dev]")] == [1] * 4
    return arguments


@pytest.fixture(scope="module")
def triton(installed: list[list[str]]) -> str:
    (found,) = (argument for each in installed for argument in each if argument.startswith("triton=="))
    return found


@pytest.mark.skipif(
    not UV.exists(), reason="UV IS NOT INSTALLED: NOT CHECKED WHETHER OTHER PYTHONS CAN INSTALL THIS"
)
@pytest.mark.parametrize(("python", "machine"), [*((python, INTEL) for python in PYTHONS), (PYTHONS[1], ARM)])
def test_what_make_installs_can_be_installed(
    python: str, machine: str, installed: list[list[str]], triton: str, tmp_path: Path
) -> None:
    """With the torch of the public index, whatever pip finds on this machine, and without compiling anything."""
    for arguments in installed:
        if arguments[-1] in ("torch", ".[docs]"):
            continue  # parts of the others, under the same constraints
        options = ("--dry-run", "--no-config", "--target", str(tmp_path), "--only-binary", ":all:")
        kept = [each for each in arguments if each not in {"--upgrade", "--target"} and "/" not in each]
        run = subprocess.run(
            [UV, "pip", "install", *options, "--python-version", python, "--python-platform", machine, *kept],
            cwd=ROOT,
            env=clean_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode == UNREACHED:
            pytest.skip(
                f"UV REACHES NO INDEX: NOT CHECKED WHETHER PYTHON {python} CAN INSTALL THIS: {run.stderr[-300:]}"
            )
        assert run.returncode == 0, run.stderr
        if arguments[-1] in (triton, ".[dev]"):
            assert f" + {triton}\n" in run.stderr, "the Makefile's TRITON is not what torch requires"


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def fake_environment(folder: Path, uv: str) -> Path:
    """An environment whose programs write down how they are called, and in which uv ends as the shell says."""
    programs = folder / "bin"
    programs.mkdir()
    for name, last in (("python", "exit 0"), ("uv", uv)):
        program(programs / name, f'echo {name} "$@" >>{folder}/calls\n{last}')
    return folder


@pytest.mark.parametrize("reached", [True, False])
def test_torchs_build_for_cpus_is_taken_where_it_can_be_had(reached: bool, tmp_path: Path) -> None:
    folder = fake_environment(tmp_path, "exit 0" if reached else "echo no route >&2; exit 2")
    run = make(f"VENV={folder}", "TORCH_BACKEND=cpu", f"{folder}/.serve")
    assert run.returncode == 0, run.stderr
    calls = [line.replace(str(folder), "VENV") for line in (folder / "calls").read_text().splitlines()]
    pip = "python -m pip --disable-pip-version-check install -q -c constraints.txt"
    assert calls == [
        f"{pip} uv",
        "uv pip install -q --python VENV/bin/python --no-cache --no-deps --torch-backend cpu "
        "-c constraints.txt torch",
        f"{pip} torch",  # what it requires, and torch itself where it is not there yet
        f"{pip} -e .",
    ]
    assert ("WARNING: PYTORCH'S cpu BUILD CANNOT BE HAD" in run.stderr) != reached
    assert ("no route" in (folder / "torch.log").read_text()) != reached
    assert make(f"VENV={folder}", "TORCH_BACKEND=cpu", "-q", f"{folder}/.serve").returncode == 0, "it is done"


def test_with_a_gpu_torch_is_what_pip_finds(tmp_path: Path) -> None:
    folder = fake_environment(tmp_path, "exit 1")
    run = make(f"VENV={folder}", "TORCH_BACKEND=index", f"{folder}/.serve")
    assert (run.returncode, run.stderr) == (0, "")
    assert "uv" not in (folder / "calls").read_text()


def test_an_installation_that_fails_is_tried_again(tmp_path: Path) -> None:
    folder = fake_environment(tmp_path, "exit 0")
    program(folder / "bin" / "python", "case \"$*\" in *' -e '*) exit 1;; esac")
    for _ in range(2):
        assert make(f"VENV={folder}", f"{folder}/.serve").returncode == 2
    assert not (folder / ".serve").exists()


def test_the_first_python_that_works_makes_the_environment(tmp_path: Path) -> None:
    """Not one that only fails, as pyenv's command for a version that is not in use, nor one without ensurepip."""
    program(tmp_path / "python3.11", "echo 'python3.11: command not found' >&2; exit 127")
    program(tmp_path / "python3.12", "exit 1  # no module named ensurepip")
    program(tmp_path / "python3.13", f'exec {sys.executable} "$@"')
    shown = make("-n", f"VENV={tmp_path}/none", "serve", path=f"{tmp_path}:/usr/bin:/bin")
    assert f"python3.13 -m venv {tmp_path}/none" in shown.stdout


@pytest.mark.parametrize("python", ["", "/bin/false", "/no/python"])
def test_without_a_python_it_says_what_to_do(python: str, tmp_path: Path) -> None:
    run = make(f"VENV={tmp_path}/none", f"PYTHON={python}", "serve")
    assert run.returncode == 2
    assert (
        "needs Python 3.11 or newer, with venv (on Debian and Ubuntu: apt-get install python3-venv)" in run.stderr
    )
    assert not (tmp_path / "none").exists()


def test_the_lowest_versions_are_those_of_the_project() -> None:
    project = """
[project]
dependencies = ["torch>=2.11,<2.14", "numpy>=2.0", "uvloop>=0.21; sys_platform != 'win32'"]
[project.optional-dependencies]
otel = ["opentelemetry-sdk[x]>=1.30"]
dev = ["snapcap[otel]", "moto[s3,server]", "numpy", "mkdocs<2"]
docs = ["mkdocs<2"]
"""
    pinned = "# versions\ntorch==2.13.0\nmoto==5.2.5\nnumpy==2.4.6\nmkdocs==1.6.1\nbotocore==1.44.5\n"
    assert constraints(project, pinned) == [
        *("torch==2.13.0", "numpy==2.0", "uvloop==0.21", "opentelemetry-sdk==1.30", "moto==5.2.5", "mkdocs==1.6.1")
    ]
    with pytest.raises(ValueError, match="numpy<3 has no lower bound"):
        constraints(project.replace("numpy>=2.0", "numpy<3"), pinned)


def test_the_tests_of_the_lowest_versions_are_there(tmp_path: Path) -> None:
    command = make("-n", f"VENV={tmp_path}", "test-lowest").stdout.splitlines()[-1]
    found = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", command)
    assert len(found) > 10
    assert [path for path, name in found if f"def {name}" not in (ROOT / path).read_text()] == []
