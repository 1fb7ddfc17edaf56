"""Reads the kernel's facts about a running process and its children: memory, CPU time, and started programs.

No privileges are needed. Two ways to find children complement each other. The kernel adds the page faults of every
child that has ended, and of its children, to its parent (proc(5), `cminflt`). If this number is 0 and no child is
alive, no process was ever started, however short-lived. The kernel does not name these children. So a second start
is watched by reading the process table every few milliseconds, which may miss a process that lives shorter than
that.

The first way has a limit: a child whose end the parent ignores (SIGCHLD set to SIG_IGN) is not counted. Neither
Python nor torch does that.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# The name may have a target in front and a version behind, such as x86_64-linux-gnu-g++-12.
_COMPILER = re.compile(
    r"(?:.+-)?(?:nvcc|ptxas|cicc|nvlink|fatbinary|gcc|g\+\+|cc|c\+\+|cc1|cc1plus|clang|clang\+\+|collect2|as|ld(?:\.\w+)?"
    r"|lld|ninja|cmake|triton)(?:-[0-9.]+)?"
)
WATCH_S = 0.005
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


class ProcessTable:
    """The parents of processes, from /proc. Later look-ups read only new processes, so they can be frequent."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}  # found by the first look-up, so an orphan keeps its true parent

    def descendants(self, pid: int) -> list[tuple[int, str]]:
        """Returns process ids and program names of the children of ``pid``, their children, and so on."""
        living = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()}
        self._parents = {known: parent for known, parent in self._parents.items() if known in living}
        for new in living - self._parents.keys():
            if fields := _stat(new):
                self._parents[new] = int(fields[1])
        below: dict[int, list[int]] = {}
        for child, parent in self._parents.items():
            below.setdefault(parent, []).append(child)
        found, waiting = [], [pid]
        while waiting:
            born = below.get(waiting.pop(), [])
            found += born
            waiting += born
        return [(child, _program(child)) for child in found]


def descendants(pid: int) -> list[tuple[int, str]]:
    """Returns the descendants of ``pid``, from one look-up in the process table."""
    return ProcessTable().descendants(pid)


class Watch:
    """Names every process that ``pid`` starts, as far as it is seen. A context manager."""

    def __init__(self, pid: int) -> None:
        """Watches ``pid``. Its parts are not named, but the processes that they start are."""
        self._pid = pid
        self._parts: set[int] = set()
        self._table = ProcessTable()
        self._seen: dict[int, set[str]] = {}
        self._looks = 0
        self._seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def programs(self) -> list[str]:
        """Names of all programs seen. A process may have several names, because exec follows fork. A process that
        was about to end may have none."""
        seen = (names for pid, names in self._seen.items() if pid not in self._parts)
        return sorted({name for names in seen for name in names} - {UNKNOWN})

    @property
    def compilers(self) -> list[str]:
        return [name for name in self.programs if is_compiler(name)]

    @property
    def interval(self) -> float:
        """Average seconds between two look-ups so far."""
        return self._seconds / max(self._looks, 1)

    def _look(self) -> None:
        began = time.monotonic()
        while not self._over.wait(WATCH_S):
            found = self._table.descendants(self._pid)
            if any(pid not in self._seen for pid, _ in found):
                self._parts.update(own_parts(self._pid))
            for pid, name in found:
                self._seen.setdefault(pid, set()).add(name)
            self._looks += 1
            self._seconds = time.monotonic() - began


def is_compiler(program: str) -> bool:
    """Returns whether a program is a compiler, an assembler, a linker or a driver of these."""
    return _COMPILER.fullmatch(program) is not None


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


def cpu_seconds(pid: int, thread: int | None = None) -> float:
    """Returns the user and system time of a process and its threads so far, or of one thread (proc(5), stat)."""
    fields = _stat(pid if thread is None else f"{pid}/task/{thread}")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes in use on all GPUs together, and by process if the driver tells."""

    used: int
    by_pid: dict[int, int]

    def held_by(self, pids: Iterable[int], before: "DeviceMemory") -> int:
        """Returns the bytes that processes hold: by the driver, or else by the growth of the whole since
        ``before``.

        In a container the driver's process ids may differ from those here.
        """
        held = sum(self.by_pid.get(pid, 0) for pid in pids)
        return held or max(self.used - before.used, 0)


def device_memory() -> DeviceMemory | None:
    """Returns the memory in use, or None without an NVIDIA GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    used = sum(int(line) for line in _smi("--query-gpu=memory.used") if line.strip().isdigit())
    by_pid: dict[int, int] = {}
    for line in _smi("--query-compute-apps=pid,used_memory"):
        pid, _, memory = line.partition(",")
        if pid.strip().isdigit() and memory.strip().isdigit():
            by_pid[int(pid)] = by_pid.get(int(pid), 0) + (int(memory) << 20)
    return DeviceMemory(used << 20, by_pid)


def gpu_name() -> str | None:
    """Returns the name of the first NVIDIA GPU and its driver, or None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    lines = _smi("--query-gpu=name,driver_version")
    return lines[0].replace(", ", ", driver ") if lines else None


def _smi(query: str) -> list[str]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.splitlines() if done.returncode == 0 else []


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


def _stat(pid: int | str) -> list[str]:
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
