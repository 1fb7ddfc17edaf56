"""Removes the working directory from the paths from which processes import modules and run programs.

`python -m` adds the working directory to the module path, as does an empty or relative entry of PYTHONPATH, of PATH
and of the linker's variables. Otherwise a user who may write to it, such as to a folder of images, could run code
in a process that has the signing key.
"""

import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

_PACKAGE = "snapcap"
# An installation, or a source tree.
_ROOT = Path(str(sys.modules[_PACKAGE].__file__)).parent.parent
# Variables with lists of folders, in which an empty entry means the working directory.
_LISTS = (
    "PYTHONPATH",
    "PATH",
    "LD_LIBRARY_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
)


def import_only_what_is_installed() -> None:
    """Remove the working directory from the module path and the environment of this process and its children.

    Imported modules stay. The folder of snapcap's packages stays in the path, wherever it is."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in os.environ else []
    try:
        here = os.getcwd()
    except OSError:  # the folder is deleted; MKL ends a process that has none
        os.chdir("/")
        here = "/"
    unwanted = {os.path.normpath(os.path.join(here, entry)) for entry in given if not os.path.isabs(entry)}
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", here):
        unwanted.add(here)
    unwanted -= {str(_ROOT), *filter(os.path.isabs, given)}
    sys.path[:] = [entry for entry in sys.path if os.path.isabs(entry) and entry not in unwanted]
    cleaned = child_environment()
    for name in _LISTS:
        if os.environ.get(name) != cleaned.get(name):
            os.environ.pop(name, None)
            os.environ.update({name: cleaned[name]} if name in cleaned else {})
    os.environ["PYTHONSAFEPATH"] = "1"


def python_module(module: str) -> list[str]:
    """Returns the command that runs a module of snapcap. Run the command with ``child_environment``."""
    return [sys.executable, "-P", "-m", module]


def child_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns this process's variables and ``more``, with which children import the packages of this process."""
    variables = dict(os.environ)
    if sys.flags.ignore_environment:
        variables = {name: value for name, value in variables.items() if not name.startswith("PYTHON")}
    variables |= {**(more or {}), "PYTHONSAFEPATH": "1"}
    library = os.path.dirname(os.__file__)  # every interpreter's module path ends with this folder and all after it
    always = sys.path[sys.path.index(library) :] if library in sys.path else []
    for name in _LISTS:
        entries = [entry for entry in variables.pop(name, "").split(os.pathsep) if os.path.isabs(entry)]
        if name == "PYTHONPATH" and not _finds_us([*entries, *always]):
            entries = [str(_ROOT), *entries]
        if entries:
            variables[name] = os.pathsep.join(entries)
    return variables


def _finds_us(path: list[str]) -> bool:
    found = PathFinder.find_spec(_PACKAGE, path)
    return found is not None and found.origin is not None and Path(found.origin).parent.parent == _ROOT
