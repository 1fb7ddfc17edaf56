"""Knows where the demo model and its samples are, and with what environment measured processes are started."""

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
    """The shipped sample images with the caption each must get."""
    captions: dict[str, str] = json.loads((SAMPLES / "captions.json").read_text())
    return {name: ((SAMPLES / name).read_bytes(), caption) for name, caption in sorted(captions.items())}


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what would change what is measured: snapcap's own variables, and that byte
    code is not kept, which an installed package has: each start would compile a hundred modules again."""
    unwanted = ("SNAPCAP_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    return {**kept, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **extra}


def fresh_caches(folder: Path) -> dict[str, str]:
    """Variables that put every compiler's cache, and temporary files, into an empty folder."""
    names = ("TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
    variables = {name: str(folder / name.lower()) for name in names}
    for path in variables.values():
        Path(path).mkdir(parents=True)
    return variables


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# Of an eager server: it would prepare weights for its next start beside what is measured.
UNPREPARED = ("--no-prepared-weights",)


def serve_command(*options: str) -> tuple[str, ...]:
    return (*SNAPCAP, "serve", "--host", "127.0.0.1", *options)


def run_snapcap(*arguments: str, extra: Mapping[str, str] | None = None) -> None:
    """Run a command to its end, which must be a good one."""
    environ, nowhere = environment(**(extra or {})), subprocess.DEVNULL
    subprocess.run([*SNAPCAP, *arguments], cwd=ROOT, env=environ, stdout=nowhere, check=True)


def build_store(cache: Path, *options: str, extra: Mapping[str, str] | None = None) -> None:
    """`snapcap build` into the store of a cache folder; nothing to do when it is there. Options that only a server
    has are left out."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(parser, BUILD_GROUPS, without=BUILD_WITHOUT)
    _, of_servers = parser.parse_known_args(options)
    kept = [each for each in options if each not in of_servers]
    run_snapcap("build", "--cache-dir", str(cache), *kept, extra=extra)


@contextlib.contextmanager
def scratch(given: Path | None = None) -> Iterator[Path]:
    """The folder that was given, or a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="snapcap-bench-", ignore_cleanup_errors=True) as name:
        yield Path(name)
