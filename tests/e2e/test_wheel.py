"""What an installation brings, and what it lives beside."""

import shutil
import subprocess
import sys
from pathlib import Path

from support.servers.server_process import clean_environment

ROOT = Path(__file__).parents[2]


def test_a_wheel_works_beside_other_packages_of_these_names(tmp_path: Path, samples: dict[Path, str]) -> None:
    """One top-level name; whatever else is called models or service is somebody else's."""
    path, text = next(iter(samples.items()))
    wheels, site, project = tmp_path / "wheels", tmp_path / "site", tmp_path / "project"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("snapcap", "models", "warmup", "service", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *options, "-w", str(wheels), str(source)], check=True)
    subprocess.run([*pip, "install", *options, "--target", str(site), *map(str, wheels.iterdir())], check=True)
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
