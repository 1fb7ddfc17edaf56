"""Compiles the same C++ once in a run of the tests, and copies what came out from then on.

    python compile_once.py COMPILER FOLDER ARGUMENT...

Many tests build the same packages, and four fifths of a build is g++. Torch's headers, the compiler and the machine
stay what they are for as long as a run takes, so that arguments and the content of files decide what comes out.

What calls kernels is compiled without optimisation, in a quarter less time; kernels are compiled as always.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_COMMENT = re.compile(rb"^//.*$", re.MULTILINE)  # into which Inductor writes its temporary folder
_PRECOMPILED = ("-D", "TORCH_INDUCTOR_PRECOMPILE_HEADERS")
_READS_OTHERS = re.compile(rb'^\s*#\s*include\s*"|\.incbin', re.MULTILINE)


def key(arguments: Sequence[str]) -> str | None:
    """Of a call; None where there is no output, or where something is read that the call does not name."""
    if "-o" not in arguments or "-" in arguments:
        return None
    digest = hashlib.sha256()
    arguments = _without_header(arguments)
    output = arguments.index("-o") + 1
    for place, argument in enumerate(arguments):
        path = Path(argument)
        part = argument.encode()
        if place == output:
            part = path.suffix.encode()
        elif path.is_file():
            part = path.read_bytes()
            if path.suffix != ".o":
                if _READS_OTHERS.search(part):
                    return None
                part = _COMMENT.sub(b"", part)
            part = path.suffix.encode() + part
        digest.update(b"%d %s" % (len(part), part))
    return digest.hexdigest()


def _without_header(arguments: Sequence[str]) -> list[str]:
    """Without what has a precompiled header read, as in a large build: it is the one that the source includes, so
    what comes out is that of a small build."""
    kept: list[str] = []
    for argument in arguments:
        if kept and (kept[-1] == "-include" or (kept[-1], argument) == _PRECOMPILED):
            kept.pop()
        else:
            kept.append(argument)
    return kept


def main(compiler: str, folder: Path, arguments: Sequence[str]) -> int:
    """Returns the compiler's exit status."""
    arguments = ["-O0" if argument == "-O1" else argument for argument in arguments]
    name = key(arguments)
    if name is None:
        os.execv(compiler, [compiler, *arguments])
    kept, output = folder / name, Path(arguments[arguments.index("-o") + 1])
    if kept.exists():
        shutil.copy(kept, output)  # with its mode: a library may be run
        return 0
    status = subprocess.run([compiler, *arguments], check=False).returncode
    if status == 0:
        whole = folder / f"{name}.{os.getpid()}"
        shutil.copy(output, whole)
        whole.replace(kept)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
