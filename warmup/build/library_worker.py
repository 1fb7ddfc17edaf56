"""Compiles the libraries of an artifact set in a worker process, so that a build can end the compilation.

stdin   the job, then {"entry": …} a line
stdout  {"digest": …, "size": …} or {"error": …} a line
"""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from snapcap.models.processing import resample
from snapcap.warmup.artifacts.manifest import CPU_LIBRARY, IMAGE_LIBRARY, Blob, describe
from snapcap.warmup.errors import BuildError
from snapcap.warmup.machine.files import new_file
from snapcap.warmup.machine.installation import require_compiler
from snapcap.warmup.machine.worker import serve_tasks
from snapcap.warmup.plan.plan import PlannedJob
from snapcap.warmup.runtime.aoti.packages import CPU_LIBRARY_SONAME, SOURCES

# The folder of each library's sources, and the name by which packages link it, if any; by entry name.
_LIBRARIES = {CPU_LIBRARY: (SOURCES, CPU_LIBRARY_SONAME), IMAGE_LIBRARY: (resample.SOURCES, None)}


def compiler_options(sources: Path) -> list[str]:
    """Returns the compiler options of a library, which are part of the artifact key. They compile for this
    machine's processor, as packages are compiled; the key's `cpu.isa` describes it."""
    return (sources / "options.txt").read_text().split()


def compile_library(folder: Path, entry: str) -> Blob:
    """Compiles the library of this entry into a build's folder. The file appears there only if the compilation
    succeeded."""
    sources, name = _LIBRARIES[entry]
    path = folder / entry
    soname = [] if name is None else [f"-Wl,-soname,{name}"]
    files = map(str, sorted(sources.glob("*.cpp")))
    with new_file(path, durable=False) as temporary:  # a build compiles a damaged library again
        command = [require_compiler(), *compiler_options(sources), *soname, "-o", str(temporary), *files]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  the compiler that compiles packages too
        if done.returncode != 0:
            raise BuildError(f"the compiler ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    return describe(path)


if __name__ == "__main__":
    sys.exit(serve_tasks(PlannedJob, lambda job: lambda task: asdict(compile_library(job.folder, task["entry"]))))
