"""Makes C++ compilers: one that hangs, one that waits, and one that all tests of a run share."""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from support.checkpoints import compile_once

from snapcap.benchmarks.harness.processes import is_gone

_SHARED = "TESTS_SHARED_COMPILER"  # the folder in PATH
_KEPT_S = 3 * 86400


def share_compiler(folder: Path) -> None:
    """Put a g++ first into PATH that compiles the same thing once, and keeps it in the folder for later runs.

    Files that no run has taken for ``_KEPT_S`` are removed."""
    if (compiler := shutil.which("g++")) is None:
        return
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_mtime < time.time() - _KEPT_S:
            file.unlink(missing_ok=True)
    kept = folder / _identity(compiler)
    programs = kept / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    # Without what a Python imports for its users, it is there in a sixtieth of a second.
    command = shlex.join([sys.executable, "-I", "-S", compile_once.__file__, compiler, str(kept)])
    program = programs / f".{os.getpid()}"
    asked = f'case "$*" in --version) exec {shlex.quote(compiler)} "$@";; esac'
    program.write_text(f'#!/bin/sh\n{asked}\nexec {command} "$@"\n')
    program.chmod(0o755)
    program.replace(programs / "g++")
    os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    os.environ[_SHARED] = str(programs)
    # The code that calls kernels is what g++ is busy with, and O1 takes it a quarter longer. How fast that code is,
    # no test is about.
    os.environ["AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"] = "O0"


def _identity(compiler: str) -> str:
    """Returns a name for what decides what comes out beside arguments and sources: the compiler with the processor
    that it compiles for, torch's headers, and the program that keeps it."""
    asked = [compiler, "-march=native", "-S", "-x", "c++", "/dev/null", "-o", "/dev/null", "-###"]
    said = subprocess.run(asked, capture_output=True, check=True).stderr
    program = Path(compile_once.__file__).read_bytes()
    parts = (said, version("torch").encode(), sys.executable.encode(), program)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def own_compiler() -> dict[str, str]:
    """Variables for a test of compiling itself: PATH without the one that is shared."""
    folders = os.environ["PATH"].split(os.pathsep)
    return {"PATH": os.pathsep.join(folder for folder in folders if folder != os.environ.get(_SHARED))}


def _written(path: Path, *lines: str) -> Path:
    """Write a compiler that says its version, and else does what the lines of shell say. ``$CXX`` is g++."""
    path.parent.mkdir(parents=True, exist_ok=True)
    version = 'case "$*" in *-version*) exec $CXX "$@";; esac'
    path.write_text("\n".join(["#!/bin/sh", f"CXX={shutil.which('g++')}", version, *lines, ""]))
    path.chmod(0o755)
    return path


@dataclass(frozen=True)
class WaitingCompiler:
    """A g++ that waits until it is let go, so that a build lasts as long as a test wants."""

    path: Path

    @classmethod
    def make(cls, folder: Path) -> "WaitingCompiler":
        gone = folder / "gone"
        wait = f"until [ -e {gone} ]; do kill -0 $PPID || exit 1; sleep 0.1; done"  # or the build is gone
        return cls(_written(folder / "g++", wait, 'exec $CXX "$@"'))

    def let_go(self) -> None:
        (self.path.parent / "gone").touch()


@dataclass(frozen=True)
class HangingCompiler:
    """A g++ that says its version, and else starts what never ends, as a driver starts `cc1plus`."""

    path: Path
    pids: Path

    @classmethod
    def make(cls, folder: Path, *, after_a_package: bool = False) -> "HangingCompiler":
        """``after_a_package``: it compiles and links the first package of a build before it hangs."""
        pids, linked = folder / "pids", folder / "linked"
        link = f'case "$*" in *.wrapper.so*) $CXX "$@"; status=$?; touch {linked}; exit $status;; esac'
        lines = [f"if ! [ -e {linked} ]; then", link, 'exec $CXX "$@"', "fi"] if after_a_package else []
        return cls(_written(folder / "g++", *lines, "sleep 1000 &", f"echo $$ $! >>{pids}", "wait"), pids)

    @property
    def hangs(self) -> bool:
        """Tells if the compiler has been called, and hangs."""
        return self.pids.exists()

    @property
    def is_gone(self) -> bool:
        """Tells if all processes of the compiler have ended, or none has begun."""
        return not self.hangs or all(is_gone(int(pid)) for pid in self.pids.read_text().split())
