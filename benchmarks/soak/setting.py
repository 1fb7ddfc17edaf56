"""Sets up the environment of a campaign's servers: a store behind a lying proxy, small file systems, own clocks."""

import contextlib
import glob
import importlib.util
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from snapcap.benchmarks.harness.moto_store import s3_artifacts
from snapcap.benchmarks.harness.workload import build_store
from snapcap.benchmarks.soak.balancer import LyingProxy

CACHE_BYTES = 512 << 20
_ENDPOINT = "--s3-endpoint-url"
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/lib/*", "/usr/local/lib")


@dataclass
class Setting:
    """The environment of a campaign.

    options, environment: of all servers.
    clock: as in `World`.
    unavailable: why a kind of fault cannot be injected here.
    """

    folder: Path
    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    proxy: LyingProxy | None = None
    clock: dict[str, str] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)

    def cache(self, name: str) -> Path:
        """Returns the cache folder of a server."""
        return self.folder / name


@contextlib.contextmanager
def artifacts(setting: Setting, sets: Path, chooser: random.Random, *options: str) -> Iterator[None]:
    """Provides the demo model's artifacts, and builds them if ``sets`` has none.

    The artifacts are on S3 behind the proxy, or in a folder if no S3 server is installed.
    """
    setting.options += ["--backend", "auto", "--build", "off"]
    if importlib.util.find_spec("moto") is None:
        setting.unavailable |= dict.fromkeys(("s3", "disk"), "moto is not installed, so nothing is fetched from S3")
        build_store(sets, *options)
        setting.options += ["--store", str(sets / "store")]
        yield
        return
    with s3_artifacts(sets, setting.folder, options) as published:
        given = list(published.options)
        setting.proxy = LyingProxy(urlsplit(given[given.index(_ENDPOINT) + 1]).port or 80, chooser)
        setting.options += given
        setting.environment |= published.environment
        yield


def direct_proxy(setting: Setting) -> None:
    """Makes servers use the proxy, once it listens."""
    if setting.proxy is not None:
        place = setting.options.index(_ENDPOINT) + 1
        setting.options[place] = f"http://127.0.0.1:{setting.proxy.port}"


@contextlib.contextmanager
def small_disks(setting: Setting, names: list[str]) -> Iterator[None]:
    """Puts the cache folder of each server on a file system of its own, if mounting is permitted."""
    mounted: list[Path] = []
    try:
        for name in names:
            folder = setting.cache(name)
            folder.mkdir(parents=True, exist_ok=True)
            command = ["mount", "-t", "tmpfs", "-o", f"size={CACHE_BYTES}", "snapcap-soak", str(folder)]
            done = _try(command)
            if done:
                setting.unavailable["disk"] = f"a small file system cannot be mounted ({done})"
                break
            mounted.append(folder)
        yield
    finally:
        for folder in mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def steppable_clock(setting: Setting) -> None:
    """Gives single servers a clock of their own, if libfaketime is installed. The machine's clock is never
    touched."""
    libraries = [path for place in _LIBRARIES for path in glob.glob(f"{place}/faketime/libfaketimeMT.so.1")]
    if not libraries:
        setting.unavailable["clock"] = "libfaketime is not installed (Debian: faketime)"
        return
    setting.clock = {
        "LD_PRELOAD": libraries[0],
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def _try(command: list[str]) -> str:
    """Returns why a command failed, or an empty text."""
    if shutil.which(command[0]) is None:
        return f"there is no {command[0]}"
    if os.geteuid() != 0:
        return "this needs root"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""
