"""Removes the files from an installation that a server of compiled models never loads: torch's Python module, the
packages that only torch requires, and the CUDA libraries that libtorch does not link.

    /opt/snapcap/bin/python compiled_only.py /opt/snapcap

The argument must be the virtual environment whose Python runs the script, so that no other environment loses torch
by mistake. The script prints the size of the removed and of the remaining files.

The environment can then no longer import torch, and `snapcap serve` refuses to start without artifacts and prepared
weights.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Runs in a process of its own: the libraries that this process maps are kept. An image is built without a CUDA
# driver, with the same result: torch looks for the driver on first use only.
_LOAD = """
import ctypes, sys
ctypes.CDLL(sys.argv[1] + "/libtorch_global_deps.so", mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[1] + "/libtorch.so")
print(open("/proc/self/maps").read())
"""
_VERSION = "torch/version.py"  # kept: the artifact key contains the version in this file of torch's module


def main() -> None:
    if sys.argv[1:] != [sys.prefix] or sys.prefix == sys.base_prefix:
        sys.exit(f"name the virtual environment that loses torch's Python module: compiled_only.py {sys.prefix}")
    removed = of_torch_alone()
    kept = mapped(torch_folder() / "lib")
    files = {path for each in removed for path in files_of(each) if path.resolve() not in kept}
    whole, size = size_of(Path(sys.prefix).rglob("*")), size_of(files)
    for path in files:
        path.unlink()
    remove_empty_folders({path.parent for path in files})
    print(f"removed {len(files)} files, {size / 1e6:.0f} MB, of {', '.join(sorted(map(name_of, removed)))}")
    print(f"left {(whole - size) / 1e6:.0f} MB, of which {size_of(kept) / 1e6:.0f} are libtorch and what it links")


def of_torch_alone() -> list[Distribution]:
    """Returns torch and the packages that nothing but torch requires."""
    installed = {name_of(each): each for each in distributions()}
    torch = required("torch")
    others = [required(name, without="torch") for name in installed if name not in torch]
    return [installed[name] for name in torch.difference(*others)]


def required(package: str, without: str = "") -> set[str]:
    """Returns the names of a package and of all packages that it requires, directly or indirectly, except through
    `without`."""
    found, waiting = set[tuple[str, str]](), [(canonicalize_name(package), "")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found or name == without:
            continue
        try:
            requirements = [Requirement(each) for each in distribution(name).requires or []]
        except PackageNotFoundError:  # a requirement for another system
            continue
        found.add((name, extra))
        for each in requirements:
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                waiting += ((canonicalize_name(each.name), asked) for asked in ("", *each.extras))
    return {name for name, _ in found}


def name_of(package: Distribution) -> str:
    return canonicalize_name(package.metadata["Name"])


def torch_folder() -> Path:
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("torch is not installed in this environment")
    return Path(spec.submodule_search_locations[0])


def mapped(libraries: Path) -> set[Path]:
    """Returns the libraries of libtorch, and the libraries that it links, inside this environment."""
    command = [sys.executable, "-c", _LOAD, str(libraries)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  nothing of it is input
    paths = {Path(line.split(maxsplit=5)[5]) for line in run.stdout.splitlines() if ".so" in line}
    return {path for path in paths if path.is_relative_to(Path(sys.prefix).resolve())}


def files_of(package: Distribution) -> Iterator[Path]:
    """Yields the files of a package and their byte code. Leaves its metadata out, as versions are read from it.
    Exits with an error if a file is outside this environment."""
    for file in package.files or []:
        path = Path(str(package.locate_file(file)))
        if ".dist-info" in file.parts[0] or str(file) == _VERSION:
            continue
        if not path.parent.resolve().is_relative_to(Path(sys.prefix).resolve()):
            sys.exit(f"{path} is outside of this environment")
        byte_code = path.parent.glob(f"__pycache__/{path.stem}.*.pyc") if path.suffix == ".py" else ()
        yield from (each for each in (path, *byte_code) if each.is_file() or each.is_symlink())


def size_of(paths: Iterable[Path]) -> int:
    """Returns the total size of the files in bytes, without links."""
    return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())


def remove_empty_folders(folders: Iterable[Path]) -> None:
    for folder in sorted(folders, key=lambda each: len(each.parts), reverse=True):
        while folder != Path(sys.prefix) and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
            folder = folder.parent  # noqa: PLW2901


if __name__ == "__main__":
    main()
