"""Reads the kernel's facts about running processes and their children: memory, CPU time, parts of a server."""

import contextlib
import os
import subprocess
from pathlib import Path


def own_parts(pid: int) -> list[int]:
    """Returns the processes that a server has forked to run parts of its program.

    The first is the engine process. The second, if any, is the parent of the decode processes, followed by these.
    Other forks, such as those of the engine process, are not included.
    """
    arguments = _arguments(pid)

    def forks(of: int) -> list[int]:
        return [child for child in children(of) if _arguments(child) == arguments != b""]

    direct = forks(pid)[:2]
    return [*direct, *(child for parent in direct[1:] for child in forks(parent))]


def children(pid: int) -> list[int]:
    """Returns the children of a process: thread by thread, from the main thread on, in the order in which each
    thread started them. Returns none if the process has ended."""
    found: list[int] = []
    for each in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the process, or this thread of it, has ended
            found += map(int, each.read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Returns the process ids of the children of ``pid``, their children, and so on."""
    direct = children(pid)
    return [*direct, *(below for child in direct for below in descendants(child))]


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
    return sum(map(process_memory, [pid, *descendants(pid)]))


def tree_cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of ``pid`` and its descendants so far."""
    return sum(map(cpu_seconds, [pid, *descendants(pid)]))


def is_gone(pid: int) -> bool:
    """Returns whether a process has ended, including zombies."""
    return _stat(pid)[:1] in ([], ["Z"])


def cpu_seconds(pid: int) -> float:
    """Returns the user and system time of a process and its threads so far (proc(5), stat)."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def gpu_name() -> str | None:
    """Returns the name of the first NVIDIA GPU and its driver, or None without one."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return done.stdout.splitlines()[0].replace(", ", ", driver ")
    return None


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


def _arguments(pid: int) -> bytes:
    """Returns the command line of a process, or b"" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
