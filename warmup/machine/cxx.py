"""Finds the C++ compiler that Inductor will call, and its version. No torch."""

import os
import shutil

from snapcap.warmup.errors import BuildError

# The version is part of the key of jit artifacts: an answer that comes too late makes good artifacts stale.
_ANSWER_S = 60.0


def find_compiler() -> str | None:
    """None where there is none."""
    return next((name for name in _names() if shutil.which(name)), None)


def require_compiler() -> str:
    """The C++ compiler that Inductor will call.

    Raises:
        BuildError: there is none.
    """
    if (name := find_compiler()) is not None:
        return name
    looked_for = " or ".join(_names())
    raise BuildError(
        f"no C++ compiler ({looked_for}) on this machine; install one (apt-get install g++), or run "
        "`snapcap build` on a machine of the same kind that has one"
    )


def compiler_version() -> str | None:
    """The first line of what it says of itself; None where there is none, or it does not say."""
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
