"""Reads the kernel's facts about a running process and its children: memory, CPU time, and started processes.

No privileges are needed. The kernel adds the page faults of every child that has ended, and of its children, to its
parent (proc(5), `cminflt`). If this number is 0 and no child is alive, no process was ever started, however
short-lived. A child whose end the parent ignores (SIGCHLD set to SIG_IGN) is not counted. Neither Python nor torch
does that.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = "?"


@dataclass(frozen=True)
class Children:
    """The processes that a process has started.

    ended: a child has ended. None if the kernel does not count.
    alive: names of the children that are alive.
    """

    ended: bool | None
    alive: tuple[str, ...]

    @property
    def none(self) -> bool:
        """True if it is certain that no process was ever started."""
        return self.ended is False and not self.alive


def children(pid: int, counts: bool, parts: Iterable[int] = ()) -> Children:
    """Returns the processes that ``pid`` has started so far.

    Args:
        counts: the result of ``kernel_counts_children``.
        parts: processes that do a part of the work of ``pid``. They are not counted, but their children are.
    """
    own = [pid, *parts]
    found = [fields for fields in map(_stat, own) if fields]
    ended = any(int(fields[8]) + int(fields[10]) > 0 for fields in found) if counts and found else None
    return Children(ended, tuple(name for child, name in descendants(pid) if child not in own))


def own_parts(pid: int) -> list[int]:
    """Returns the processes that a server has forked to run parts of its program.

    The first is the engine process. The second, if any, is the parent of the decode processes, followed by these.
    Other forks, such as those of the engine process, are not included.
    """
    parents, arguments = _parents(), _arguments(pid)

    def forks(of: int) -> list[int]:
        born = sorted(child for child, parent in parents.items() if parent == of)
        return [child for child in born if _arguments(child) == arguments != []]

    direct = forks(pid)[:2]
    return [*direct, *(child for parent in direct[1:] for child in forks(parent))]


def kernel_counts_children() -> bool:
    """Returns whether this kernel counts children as described above, by trying. A sandbox's kernel may not."""
    script = "import subprocess, sys; subprocess.run(['true']); print('done', flush=True); sys.stdin.read()"
    command = [sys.executable, "-S", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        if child.stdout is None or child.stdout.readline() != b"done\n":
            return False
        found = children(child.pid, counts=True)
        child.communicate()
    return bool(found.ended)


def descendants(pid: int) -> list[tuple[int, str]]:
    """Returns process ids and program names of the children of ``pid``, their children, and so on."""
    below: dict[int, list[int]] = {}
    for child, parent in _parents().items():
        below.setdefault(parent, []).append(child)
    found, waiting = list[int](), [pid]
    while waiting:
        born = below.get(waiting.pop(), [])
        found += born
        waiting += born
    return [(child, _program(child)) for child in found]


def peak_host_bytes(pid: int) -> int | None:
    """Returns the peak physical memory of the process (VmHWM) in bytes, or None if the kernel does not tell."""
    return _field_bytes(pid, "status", "VmHWM:")


def process_memory(pid: int) -> int:
    """Returns the memory of one process in bytes, or 0 if it has ended.

    The memory is the proportional set size, in which a page that n processes share counts 1/n. If the kernel does
    not tell it, the memory is the resident set size.
    """
    proportional = _field_bytes(pid, "smaps_rollup", "Pss:")
    return (_field_bytes(pid, "status", "VmRSS:") if proportional is None else proportional) or 0


def tree_memory(pid: int) -> int:
    """Returns the memory of ``pid`` and its descendants in bytes, each shared page once, or 0 if none is alive."""
    return sum(map(process_memory, _tree(pid)))


def tree_cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of ``pid`` and its descendants so far."""
    return sum(map(cpu_seconds, _tree(pid)))


def is_gone(pid: int) -> bool:
    """Returns whether a process has ended, including zombies."""
    return _stat(pid)[:1] in ([], ["Z"])


def cpu_seconds(pid: int) -> float:
    """Returns the user and system time of a process and its threads so far (proc(5), stat)."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def gpu_name() -> str | None:
    """Returns the name of the first NVIDIA GPU and its driver, or None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return lines[0].replace(", ", ", driver ") if lines else None


def _tree(pid: int) -> list[int]:
    """Returns a process and its descendants."""
    return [pid, *(child for child, _ in descendants(pid))]


def _field_bytes(pid: int, file: str, field: str) -> int | None:
    """Returns a field of a file of /proc/PID in bytes, which is in kB there. None if the process has ended, or the
    field is missing."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) << 10
    return None


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat behind the program's name: state, parent, …; empty if the process has
    ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _program(pid: int) -> str:
    """Returns the name of a process's program, or of Python's module if it was started with -m."""
    words = _arguments(pid)
    if not words:
        return UNKNOWN
    name = words[0].rpartition("/")[2]
    if name.startswith("python") and "-m" in words[:-1]:
        return f"python -m {words[words.index('-m') + 1]}"
    return name


def _arguments(pid: int) -> list[str]:
    """Returns the command line of a process, or an empty list if it has ended."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []
    return [argument.decode(errors="replace") for argument in arguments]


def _parents() -> dict[int, int]:
    """Returns the parent of each process."""
    found = ((int(entry), _stat(int(entry))) for entry in os.listdir("/proc") if entry.isdigit())
    return {pid: int(fields[1]) for pid, fields in found if fields}
