"""Finds installed software, such as torch and a C++ compiler, without importing it, and resolves the device."""

import importlib.util
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from snapcap.warmup.errors import BuildError
from snapcap.warmup.machine.cuda_driver import cuda_device_count


class MachineError(RuntimeError):
    """Says in one line what this machine lacks, and what to do."""


class TorchVersion(NamedTuple):
    """Holds the version of torch from torch/version.py; ``cuda`` is None for a CPU build."""

    version: str
    git_version: str
    cuda: str | None


def torch_version() -> TorchVersion:
    """Returns torch's version without importing torch. Raises MachineError if torch is not installed."""
    try:
        version = runpy.run_path(str(package_folder("torch") / "version.py"))
        return TorchVersion(str(version["__version__"]), str(version["git_version"]), version["cuda"])
    except (OSError, KeyError) as error:
        raise MachineError("cannot read torch's version; is torch installed in this environment?") from error


def package_folder(package: str) -> Path:
    """Returns the folder with the modules of an installed package. Raises MachineError if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MachineError(f"the package {package} is not installed in this environment")
    return Path(spec.submodule_search_locations[0])


def has_torch_module() -> bool:
    """Returns whether torch can be imported. An installation only for compiled models has only torch's libraries.
    Raises MachineError if torch is not installed."""
    return (package_folder("torch") / "__init__.py").is_file()


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package, from the name of its metadata folder (PEP 427), or None.

    `importlib.metadata` does the same, but its import takes a tenth of a start's time for imports. ``package``: the
    name in the folder's spelling: lower case, with underscores."""
    folders = (folder for entry in filter(None, sys.path) for folder in Path(entry).glob(f"{package}-*.dist-info"))
    return next((folder.name.removesuffix(".dist-info").partition("-")[2] for folder in folders), None)


def resolve_device(device: str) -> str:
    """Returns the device for a name. ``auto`` is ``cuda:0`` if torch and the driver support it, else ``cpu``; any
    other name is returned as it is. Raises MachineError if torch is not installed."""
    if device != "auto":
        return device
    return "cuda:0" if torch_version().cuda is not None and cuda_device_count() else "cpu"


# Seconds for the compiler to name its version, which is in the key of jit artifacts: without it they are stale.
_ANSWER_S = 60.0


def find_compiler() -> str | None:
    """Returns the name of the first C++ compiler that is installed, or None."""
    return next((name for name in _names() if shutil.which(name)), None)


def require_compiler() -> str:
    """Returns the C++ compiler that Inductor will call. Raises BuildError if there is none, or if Inductor cannot
    name files of the temporary folder to it: Inductor splits the compiler's command line at spaces."""
    from tempfile import gettempdir  # noqa: PLC0415 - a compiled start compiles nothing

    folder = gettempdir()
    if re.search(r"[\s'\"\\]", folder):
        raise BuildError(
            f"nothing can be compiled in the temporary folder {folder!r}, because its name has a space, a quote or "
            "a backslash; set TMPDIR to another folder"
        )
    if (name := find_compiler()) is not None:
        return name
    looked_for = " or ".join(_names())
    raise BuildError(
        f"no C++ compiler ({looked_for}) on this machine; install one (apt-get install g++), or run "
        "`snapcap build` on a machine of the same kind that has one"
    )


def compiler_version() -> str | None:
    """Returns the first line of the C++ compiler's `--version`; None without a compiler or an answer."""
    import subprocess  # noqa: PLC0415 - a compiled start asks no compiler

    name = find_compiler()
    if name is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603  the compiler that is going to be run anyway
            [name, "--version"], capture_output=True, text=True, check=True, timeout=_ANSWER_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return " ".join(done.stdout.partition("\n")[0].split()) or None


def _names() -> list[str]:
    """Returns the names of the compilers to try, in order: CXX alone if it is set, else the usual names."""
    return [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
