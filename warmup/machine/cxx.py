"""Finds the C++ compiler that Inductor will call, and its version. No torch."""

import os
import shutil
import subprocess


def compiler_names() -> list[str]:
    """Those that are looked for, the first that is there is taken; CXX is the only one where it is set."""
    return [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]


def find_compiler() -> str | None:
    """None where there is none."""
    return next((name for name in compiler_names() if shutil.which(name)), None)


def compiler_version() -> str | None:
    """The first line of what it says of itself; None where there is none, or it does not say."""
    name = find_compiler()
    if name is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603  the compiler that is going to be run anyway
            [name, "--version"], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return " ".join(done.stdout.partition("\n")[0].split()) or None
