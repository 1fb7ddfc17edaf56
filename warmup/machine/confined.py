"""Confines a process that reads untrusted bytes: removes its access to secrets, files, sockets and processes.

An exploited codec or tokenizer runs the attacker's code with the rights of its process. Such a process calls
`forget_environment` before it is forked, or is started with `clean_environment`, and calls `confine` once all its
modules are imported. If the kernel denies one of these calls, it is logged once, and the process is less confined.
"""

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from snapcap.warmup.machine.denied import report_denied

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_SECCOMP_SET_MODE_FILTER = 1
# Without this flag, kernels before 5.16 turn on mitigations of speculative reads that slow the process down.
_SECCOMP_FILTER_FLAG_SPEC_ALLOW = 4
_SECCOMP_FILTER_FLAG_TSYNC = 1  # applies the filter to all threads
_ALLOW, _DENY, _NO_SUCH_CALL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
# Classic BPF, as linux/bpf_common.h has it: load a word, jump if equal, jump if a bit is set, return.
_LOAD, _IF_EQUAL, _IF_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
# Offsets in the kernel's `struct seccomp_data`; both machines keep the low half of an argument first.
_CALL, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_CLONE_THREAD = 0x00010000
# By `os.uname().machine`: the kernel's number of the machine, and the place of its call numbers in the table below.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_SECCOMP, _CAPSET = (317, 277), (126, 91)
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
# Each of these works on memory, time, or a file that is open already.
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "brk": (12, 214),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "close": (3, 57),
    "dup2": (33, None),
    "dup3": (292, 24),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "fstat": (5, 80),
    "futex": (202, 98),
    "getcpu": (309, 168),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getrandom": (318, 278),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "lseek": (8, 62),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "poll": (7, None),
    "ppoll": (271, 73),
    "pread64": (17, 67),
    "pselect6": (270, 72),
    "pwrite64": (18, 68),
    "read": (0, 63),
    "readv": (19, 65),
    "recvfrom": (45, 207),
    "restart_syscall": (219, 128),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "select": (23, None),
    "sendto": (44, 206),
    "set_robust_list": (273, 99),
    "setrlimit": (160, 164),
    "sigaltstack": (131, 132),
    "time": (201, None),
    "write": (1, 64),
    "writev": (20, 66),
}
_CLONE, _CLONE3, _PRLIMIT64, _TGKILL = (56, 220), (435, 435), (302, 261), (234, 131)
# A child's Python needs these to begin as its parent did; none of them is a secret.
_KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "TMPDIR", "TZ")


class _Program(ctypes.Structure):
    """The kernel's `struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a child's Python needs, without secrets such as those of AWS and the hub."""
    return {name: value for name, value in environment.items() if name in _KEPT or name.startswith("PYTHON")}


def forget_environment() -> None:
    """Removes all environment variables of this process, also from the memory in which the kernel put them.

    `os.environ` alone would leave them readable in `/proc/self/environ` and to code that scans memory."""
    for value in os.environ._data.values():  # type: ignore[attr-defined]
        _overwrite(value)
    os.environ.clear()
    try:
        # Fields 50 and 51 of proc(5), counted behind the name, which may have spaces and half a letter.
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        first, end = int(fields[47]), int(fields[48])
    except (OSError, ValueError, IndexError):  # not Linux
        return
    if 0 < first < end:
        ctypes.memset(first, 0, end - first)


def confine(threads: bool = False) -> None:
    """Denies this process, for good, all system calls that work on more than its memory and its open files.

    The process can open no file and no socket, start no process, and signal no other process. Other programs of the
    same user can neither read its memory nor attach to it. A root process loses all capabilities. ``threads``:
    allow new threads, for a library that needs them. Running threads continue."""
    import linecache  # noqa: F401, PLC0415  tracebacks import both, which opens files
    import tokenize  # noqa: F401, PLC0415

    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, name in (
        (_PR_SET_DUMPABLE, 0, "PR_SET_DUMPABLE"),
        (_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS"),
    ):
        if libc.prctl(option, value, 0, 0, 0):
            report_denied(name, "processes that read images and prompts go without it", _reason())
    machine = _MACHINES.get(os.uname().machine)
    if machine is None:
        _no_filter(f"no table of system calls for {os.uname().machine}")
        return
    number, place = machine
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)
    if libc.syscall(_CAPSET[place], header, none):
        report_denied("capset", "processes that read images and prompts keep their capabilities", _reason())
    code = b"".join(_filter(number, place, threads))
    program = _Program(len(code) // 8, code)
    result = -1
    # gVisor, and Linux before 4.17, know only the flag TSYNC.
    for flags in (_SECCOMP_FILTER_FLAG_TSYNC | _SECCOMP_FILTER_FLAG_SPEC_ALLOW, _SECCOMP_FILTER_FLAG_TSYNC):
        result = libc.syscall(_SECCOMP[place], _SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(program))
        if result != -1 or ctypes.get_errno() != errno.EINVAL:
            break
    if result:
        _no_filter(_reason() if result < 0 else f"thread {result} has another filter")


def _filter(machine: int, place: int, threads: bool) -> Iterator[bytes]:
    """Yields the filter's instructions, 8 bytes each. A call that is not allowed fails with EPERM."""
    yield _instruction(_LOAD, _ARCHITECTURE)
    yield _instruction(_IF_EQUAL, machine, 1, 0)
    yield _instruction(_RETURN, _DENY)
    yield _instruction(_LOAD, _CALL)
    for numbers in _CALLS.values():
        number = numbers[place]
        if number is not None:
            yield _instruction(_IF_EQUAL, number, 0, 1)
            yield _instruction(_RETURN, _ALLOW)
    if threads:
        # The C library falls back to clone, whose flags can be looked at: those of clone3 are in memory.
        yield _instruction(_IF_EQUAL, _CLONE3[place], 0, 1)
        yield _instruction(_RETURN, _NO_SUCH_CALL)
        yield _instruction(_IF_EQUAL, _CLONE[place], 0, 4)
        yield _instruction(_LOAD, _FIRST_ARGUMENT)
        yield _instruction(_IF_SET, _CLONE_THREAD, 0, 1)
        yield _instruction(_RETURN, _ALLOW)
        yield _instruction(_RETURN, _DENY)
    # The first argument is the process: 0 for this one's limits, its number for abort(), which signals itself.
    for numbers, process in ((_PRLIMIT64, 0), (_TGKILL, os.getpid())):
        yield _instruction(_IF_EQUAL, numbers[place], 0, 4)
        yield _instruction(_LOAD, _FIRST_ARGUMENT)
        yield _instruction(_IF_EQUAL, process, 0, 1)
        yield _instruction(_RETURN, _ALLOW)
        yield _instruction(_RETURN, _DENY)
    yield _instruction(_RETURN, _DENY)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _overwrite(data: bytes) -> None:
    """Sets the bytes of an unused object to zero, because freed memory keeps its content."""
    if len(data) > 1:  # Python has one object for each single byte
        ctypes.memset(id(data) + bytes.__basicsize__ - 1, 0, len(data))


def _reason() -> str:
    return os.strerror(ctypes.get_errno())


def _no_filter(reason: str) -> None:
    report_denied("seccomp", "processes that read images and prompts may use every system call", reason)
