"""What an installation brings, and what it lives beside."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.servers.server_process import ServerProcess, clean_environment

ROOT = Path(__file__).parents[2]
COMPILED_ONLY = ROOT / "deploy" / "container" / "compiled_only.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which nothing is installed but the wheel of this tree."""
    base = tmp_path_factory.mktemp("wheel")
    wheels, site, source = base / "wheels", base / "site", base / "source"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("snapcap", "models", "warmup", "service", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *options, "-w", str(wheels), str(source)], check=True)
    subprocess.run([*pip, "install", *options, "--target", str(site), *map(str, wheels.iterdir())], check=True)
    return site


def test_a_wheel_works_beside_other_packages_of_these_names(
    site: Path, tmp_path: Path, samples: dict[Path, str]
) -> None:
    """One top-level name; whatever else is called models or service is somebody else's."""
    path, text = next(iter(samples.items()))
    project = tmp_path / "project"
    names = {each.name for each in site.iterdir() if not each.name.endswith(".dist-info")}
    assert names == {"snapcap", "bin"}
    assert (site / "snapcap" / "py.typed").is_file()
    assert not [each for name in ("training", "results") for each in site.rglob(name)]
    for name in ("models", "service", "warmup", "benchmarks"):
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text("mine = True\n")
    (project / "main.py").write_text(
        "import sys, models, service, snapcap\n"
        "from snapcap import Captioner\n"
        "assert models.mine and service.mine and snapcap.__file__.startswith(sys.argv[1])\n"
        "with Captioner(backend='eager', buckets=(1,), cache_dir=sys.argv[2]) as one: print(one(sys.argv[3]))\n"
    )
    command = [sys.executable, "main.py", str(site), str(tmp_path / "cache"), str(path)]
    environment = clean_environment(PYTHONPATH=str(site))
    run = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.strip() == text, run.stderr


@pytest.fixture(scope="module")
def compiled_only(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with snapcap and what it requires, without torch's module."""
    prefix = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(prefix)], check=True)
    (packages,) = prefix.glob("lib/python3.*/site-packages")
    shutil.copytree(site, packages, dirs_exist_ok=True)
    for name in requirements_of("snapcap"):
        for file in distribution(name).files or []:
            source, target = Path(str(distribution(name).locate_file(file))), packages / file
            if ".." not in file.parts and source.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(source, target)
    interpreter = prefix / "bin" / "python"
    unnamed = subprocess.run([interpreter, COMPILED_ONLY], capture_output=True, text=True, check=False)
    assert (unnamed.returncode, unnamed.stdout) == (1, "")
    assert (packages / "torch" / "__init__.py").exists()
    run = subprocess.run([interpreter, COMPILED_ONLY, prefix], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    removed = run.stdout.splitlines()[0].rpartition(" of ")[2].split(", ")
    assert {"torch", "sympy"} <= set(removed)
    assert not {"numpy", "snapcap", "fastapi"} & set(removed)
    return interpreter


def requirements_of(package: str) -> set[str]:
    """All that is required, without extras."""
    found, waiting = set[str](), [package]
    while waiting:
        name = waiting.pop()
        try:
            requirements = [Requirement(each) for each in distribution(name).requires or []]
        except PackageNotFoundError:
            continue
        waiting += [
            each.name
            for each in requirements
            if each.name not in found and (each.marker is None or each.marker.evaluate({"extra": ""}))
        ]
        found.add(name)
    return found - {package}


def test_torchs_libraries_are_enough_for_a_compiled_server(
    compiled_only: Path, built_cache: Path, samples: dict[Path, str]
) -> None:
    class Server(ServerProcess):
        interpreter = str(compiled_only)
        program = ("-P", "-m", "snapcap")  # what is installed, and not this tree

    options = ("--cache-dir", str(built_cache), "--buckets", "1,4", "--build", "off")
    with Server(*options) as server:
        server.wait_for(lambda: server.call("/readyz")[0] == 200)
        startup = server.startup()
        captions = {path: server.caption(path)["caption"] for path in samples}
    assert (startup["tier"], startup["torch_modules"]) == ("aot", 0)
    assert captions == samples


@pytest.mark.parametrize(
    ("command", "options", "reason"),
    [
        ("serve", (), "there are no prepared weights yet"),
        ("serve", ("--buckets", "1,2"), "the start found artifacts: miss"),
        ("serve", ("--backend", "eager"), "the eager backend was asked for"),
        ("build", (), "build where torch is installed completely"),
    ],
)
def test_without_what_was_compiled_it_says_so_in_one_line_and_ends(
    command: str, options: tuple[str, ...], reason: str, compiled_only: Path, built_cache: Path, tmp_path: Path
) -> None:
    cache = built_cache if options else tmp_path
    arguments = [command, "--cache-dir", str(cache), *options, *(("--port", "0") if command == "serve" else ())]
    environment = clean_environment(SNAPCAP_PREPARED_WEIGHTS="true")
    run = subprocess.run(
        [compiled_only, "-P", "-m", "snapcap", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == (2 if command == "build" else 3)  # a configuration, and a start that failed
    last = run.stderr.splitlines()[-1]
    assert last.startswith("snapcap: torch's libraries are installed here without its Python module, ")
    assert reason in last
    assert "Traceback" not in run.stderr
