"""Makes a C++ compiler that hangs."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from support.servers.server_process import is_gone


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
        """Whether it has been called."""
        return self.pids.exists()

    @property
    def is_gone(self) -> bool:
        """Whether none of its processes is left."""
        return all(is_gone(int(pid)) for pid in self.pids.read_text().split())
