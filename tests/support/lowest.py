"""Prints constraints for `make test-lowest`: dependencies at their lower bounds, tools as constraints.txt has them.

    python tests/support/lowest.py pyproject.toml constraints.txt

torch is the one of constraints.txt: pip finds builds for CPUs of few versions.
"""

import re
import sys
import tomllib
from pathlib import Path

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w,-]+\])?(?:>=(?P<lowest>[\w.]+))?")
_TOOLS = ("dev", "docs")  # extras that only the repository needs


def constraints(pyproject: str, pinned: str) -> list[str]:
    """Lines of a constraints file, from the content of both files.

    Raises:
        ValueError: a dependency has no lower bound.
    """
    project = tomllib.loads(pyproject)["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    versions = dict(line.split("==", 1) for line in pinned.splitlines() if "==" in line)
    found: dict[str, str] = {}
    for requirement in sum((extras[name] for name in extras if name not in _TOOLS), project["dependencies"]):
        name, lowest = _parts(requirement)
        if lowest is None:
            raise ValueError(f"{requirement} has no lower bound")
        found[name] = versions["torch"] if name == "torch" else lowest
    for requirement in extras["dev"]:
        name, _ = _parts(requirement)
        if name in versions:
            found.setdefault(name, versions[name])
    return [f"{name}=={version}" for name, version in found.items()]


def _parts(requirement: str) -> tuple[str, str | None]:
    found = _REQUIREMENT.match(requirement)
    assert found is not None, requirement
    return found["name"], found["lowest"]


if __name__ == "__main__":
    print(*constraints(*(Path(path).read_text() for path in sys.argv[1:])), sep="\n")
