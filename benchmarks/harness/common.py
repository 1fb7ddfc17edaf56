"""Knows the demo model and its samples, and starts snapcap's commands in the environment of measurements."""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from snapcap.service.config.reader import BUILD_GROUPS, BUILD_WITHOUT, add_arguments

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
SAMPLES = DEMO / "samples"
SNAPCAP = (sys.executable, "-m", "snapcap")


def samples() -> dict[str, tuple[bytes, str]]:
    """Returns the shipped sample images, each with the caption that it must get."""
    captions: dict[str, str] = json.loads((SAMPLES / "captions.json").read_text())
    return {name: ((SAMPLES / name).read_bytes(), caption) for name, caption in sorted(captions.items())}


def environment(**extra: str) -> dict[str, str]:
    """Returns this process's environment without variables that would change a measurement.

    Snapcap's own variables are removed. The variable that keeps Python from writing byte code is removed too,
    because installed packages have byte code, and otherwise each start would compile a hundred modules again.
    """
    unwanted = ("SNAPCAP_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    return {**kept, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **extra}


def fresh_caches(folder: Path) -> dict[str, str]:
    """Returns variables that put every compiler's cache, and temporary files, into an empty folder."""
    names = ("TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
    variables = {name: str(folder / name.lower()) for name in names}
    for path in variables.values():
        Path(path).mkdir(parents=True)
    return variables


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# Options of an eager server, which would otherwise prepare weights for its next start during the measurement.
UNPREPARED = ("--no-prepared-weights",)


def serve_command(*options: str) -> tuple[str, ...]:
    return (*SNAPCAP, "serve", "--host", "127.0.0.1", *options)


def run_snapcap(*arguments: str, extra: Mapping[str, str] | None = None) -> None:
    """Runs a command and waits for it.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    environ, nowhere = environment(**(extra or {})), subprocess.DEVNULL
    subprocess.run([*SNAPCAP, *arguments], cwd=ROOT, env=environ, stdout=nowhere, check=True)


def build_store(cache: Path, *options: str, extra: Mapping[str, str] | None = None) -> None:
    """Runs `snapcap build` into the store of a cache folder, which does nothing if the artifact set exists.
    Options that only a server has are left out."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(parser, BUILD_GROUPS, without=BUILD_WITHOUT)
    _, of_servers = parser.parse_known_args(options)
    kept = [each for each in options if each not in of_servers]
    run_snapcap("build", "--cache-dir", str(cache), *kept, extra=extra)


@contextlib.contextmanager
def scratch(given: Path | None = None) -> Iterator[Path]:
    """Yields the given folder, or a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="snapcap-bench-", ignore_cleanup_errors=True) as name:
        yield Path(name)
