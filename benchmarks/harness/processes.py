"""Reads what the kernel tells of a running process and its children: memory, CPU time, and what it has started.

No privileges are needed. Two looks at children complement each other. The kernel adds the page faults of every
child that has ended, and of theirs, to its parent (proc(5), `cminflt`): 0 there and no living child means that no
process was ever started, however short-lived. It does not name them, so a second start is watched by looking at the
process table every few milliseconds; this may miss one that lived shorter than that. Limit of the first: a child
whose end the parent ignores (SIGCHLD set to SIG_IGN) is not counted; neither Python nor torch does that.
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

# With a target in front and a version behind, as in x86_64-linux-gnu-g++-12.
_COMPILER = re.compile(
    r"(?:.+-)?(?:nvcc|ptxas|cicc|nvlink|fatbinary|gcc|g\+\+|cc|c\+\+|cc1|cc1plus|clang|clang\+\+|collect2|as|ld(?:\.\w+)?"
    r"|lld|ninja|cmake|triton)(?:-[0-9.]+)?"
)
WATCH_S = 0.005
UNKNOWN = "?"


@dataclass(frozen=True)
class Children:
    """What a process has started. ``ended``: whether any child has ended, None where the kernel does not count;
    ``alive``: names of those that live."""

    ended: bool | None
    alive: tuple[str, ...]

    @property
    def none(self) -> bool:
        """Whether it is certain that no process was ever started."""
        return self.ended is False and not self.alive


def children(pid: int, counts: bool, parts: Iterable[int] = ()) -> Children:
    """What ``pid`` has started so far; ``counts`` is what ``kernel_counts_children`` found. ``parts``: processes
    that do a part of its work, which are not counted, but what they have started is."""
    own = [pid, *parts]
    found = [fields for fields in map(_stat, own) if fields]
    ended = any(int(fields[8]) + int(fields[10]) > 0 for fields in found) if counts and found else None
    return Children(ended, tuple(name for child, name in descendants(pid) if child not in own))


def own_parts(pid: int) -> list[int]:
    """The processes that a server has forked to run parts of its program: the engine process, which is the first,
    the parent of those that decode, where there are any, and these. Whatever else is forked, by the engine process
    for one, is none of them."""
    parents, arguments = _parents(), _arguments(pid)

    def forks(of: int) -> list[int]:
        born = sorted(child for child, parent in parents.items() if parent == of)
        return [child for child in born if _arguments(child) == arguments != []]

    direct = forks(pid)[:2]
    return [*direct, *(child for parent in direct[1:] for child in forks(parent))]


def kernel_counts_children() -> bool:
    """Whether this kernel accounts children as described above; a sandbox's may not. Found out by trying."""
    script = "import subprocess, sys; subprocess.run(['true']); print('done', flush=True); sys.stdin.read()"
    command = [sys.executable, "-S", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        if child.stdout is None or child.stdout.readline() != b"done\n":
            return False
        found = children(child.pid, counts=True)
        child.communicate()
    return bool(found.ended)


class ProcessTable:
    """Who started whom, read from /proc. Looking again reads only what is new, so it can be done often."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}  # as of the first look: an orphan keeps its true parent

    def descendants(self, pid: int) -> list[tuple[int, str]]:
        """Process ids and program names of the children of ``pid``, their children, and so on."""
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
    """The descendants of ``pid`` by one look at the process table."""
    return ProcessTable().descendants(pid)


class Watch:
    """Names every process that ``pid`` starts, as far as it is seen; a context manager."""

    def __init__(self, pid: int) -> None:
        """The parts of ``pid`` are not named, but what they start is."""
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
        """Names of all programs seen; one process may have been several, as fork is followed by exec. Of one
        that was about to end the name was gone already."""
        seen = (names for pid, names in self._seen.items() if pid not in self._parts)
        return sorted({name for names in seen for name in names} - {UNKNOWN})

    @property
    def compilers(self) -> list[str]:
        return [name for name in self.programs if is_compiler(name)]

    @property
    def interval(self) -> float:
        """Seconds from one look to the next, on average so far."""
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
    """Whether a program is a compiler, an assembler, a linker or what drives them."""
    return _COMPILER.fullmatch(program) is not None


def peak_host_bytes(pid: int) -> int | None:
    """The most physical memory the process has had (VmHWM), None where the kernel does not say."""
    return _field_bytes(pid, "status", "VmHWM:")


def process_memory(pid: int) -> int:
    """Bytes of one process: its proportional set size, in which a page that n processes share counts 1/n. Where the
    kernel does not tell that, its resident set size. 0 when it has ended."""
    proportional = _field_bytes(pid, "smaps_rollup", "Pss:")
    return (_field_bytes(pid, "status", "VmRSS:") if proportional is None else proportional) or 0


def tree_memory(pid: int) -> int:
    """Bytes of ``pid`` and its descendants, each shared page once; 0 where none lives."""
    return sum(map(process_memory, _tree(pid)))


def tree_cpu_seconds(pid: int) -> float:
    """CPU seconds of ``pid`` and its descendants so far."""
    return sum(map(cpu_seconds, _tree(pid)))


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it waited for or not."""
    return _stat(pid)[:1] in ([], ["Z"])


def cpu_seconds(pid: int, thread: int | None = None) -> float:
    """User and system time of a process and its threads so far, or of one thread (proc(5), stat)."""
    fields = _stat(pid if thread is None else f"{pid}/task/{thread}")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


@dataclass(frozen=True)
class DeviceMemory:
    """Memory in use on all GPUs together, and by process where the driver tells; bytes."""

    used: int
    by_pid: dict[int, int]

    def held_by(self, pids: Iterable[int], before: "DeviceMemory") -> int:
        """What processes hold: as the driver says, or, in a container where its numbering differs, by how much the
        whole has grown."""
        held = sum(self.by_pid.get(pid, 0) for pid in pids)
        return held or max(self.used - before.used, 0)


def device_memory() -> DeviceMemory | None:
    """None without an NVIDIA GPU."""
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
    """Name of the first NVIDIA GPU with its driver; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    lines = _smi("--query-gpu=name,driver_version")
    return lines[0].replace(", ", ", driver ") if lines else None


def _smi(query: str) -> list[str]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.splitlines() if done.returncode == 0 else []


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    return [pid, *(child for child, _ in descendants(pid))]


def _field_bytes(pid: int, file: str, field: str) -> int | None:
    """A field of a file of /proc/PID that is in kB there; None when the process has ended, or has no such field."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) << 10
    return None


def _stat(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat after the program's name: state, parent, …; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _program(pid: int) -> str:
    """The name of the program a process runs; Python's is its module where it was started with -m."""
    words = _arguments(pid)
    if not words:
        return UNKNOWN
    name = words[0].rpartition("/")[2]
    if name.startswith("python") and "-m" in words[:-1]:
        return f"python -m {words[words.index('-m') + 1]}"
    return name


def _arguments(pid: int) -> list[str]:
    """The command line of a process; empty when it has ended."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []
    return [argument.decode(errors="replace") for argument in arguments]


def _parents() -> dict[int, int]:
    """The parent of each process."""
    found = ((int(entry), _stat(int(entry))) for entry in os.listdir("/proc") if entry.isdigit())
    return {pid: int(fields[1]) for pid, fields in found if fields}
