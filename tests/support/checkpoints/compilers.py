"""Makes a C++ compiler that hangs, and one that all tests of a run share."""

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from support.checkpoints import compile_once
from support.servers.server_process import is_gone

_SHARED = "TESTS_SHARED_COMPILER"  # the folder in PATH


def share_compiler(folder: Path) -> None:
    """Put a g++ first into PATH that compiles the same thing once, and keeps it in the folder."""
    if (compiler := shutil.which("g++")) is None:
        return
    kept, programs = folder / "kept", folder / "programs"
    kept.mkdir()
    programs.mkdir()
    # Without what a Python imports for its users, it is there in a sixtieth of a second.
    command = shlex.join([sys.executable, "-I", "-S", compile_once.__file__, compiler, str(kept)])
    (programs / "g++").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    (programs / "g++").chmod(0o755)
    os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    os.environ[_SHARED] = str(programs)
    # The code that calls kernels is what g++ is busy with, and O1 takes it a quarter longer. How fast that code is,
    # no test is about.
    os.environ["AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"] = "O0"


def own_compiler() -> dict[str, str]:
    """Variables for a test of compiling itself: PATH without the one that is shared."""
    folders = os.environ["PATH"].split(os.pathsep)
    return {"PATH": os.pathsep.join(folder for folder in folders if folder != os.environ.get(_SHARED))}


@dataclass(frozen=True)
class HangingCompiler:
    """A g++ that says its version, and else starts what never ends, as a driver starts `cc1plus`."""

    path: Path
    pids: Path

    @classmethod
    def make(cls, folder: Path) -> "HangingCompiler":
        folder.mkdir(parents=True, exist_ok=True)
        compiler = cls(folder / "g++", folder / "pids")
        compiler.path.write_text(
            "#!/bin/sh\n"
            f'case "$*" in *-version*) exec {shutil.which("g++")} "$@";; esac\n'
            f"sleep 1000 &\necho $$ $! >>{compiler.pids}\nwait\n"
        )
        compiler.path.chmod(0o755)
        return compiler

    @property
    def hangs(self) -> bool:
        """Tells if the compiler has been called, and hangs."""
        return self.pids.exists()

    @property
    def is_gone(self) -> bool:
        """Tells if all processes of the compiler have ended."""
        return all(is_gone(int(pid)) for pid in self.pids.read_text().split())
