"""Runs a command in which the kernel denies system calls, as systemd's SystemCallFilter or a sandbox does.

`python denied.py EPERM flock,memfd_create -- command …`
"""

import ctypes
import errno
import os
import platform
import struct
import sys

# (x86-64, ARM64); None where there is no such call.
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "flock": (73, 32),
    "setpriority": (141, 140),
    "getpriority": (140, 141),
    "memfd_create": (319, 279),
    "prlimit64": (302, 261),
    "getrlimit": (97, 163),
    "setrlimit": (160, 164),
    "sched_setaffinity": (203, 122),
    "sched_getaffinity": (204, 123),
    "sched_setscheduler": (144, 119),
    "mlock": (149, 228),
    "mlock2": (325, 284),
    "mlockall": (151, 230),
    "ioprio_set": (251, 30),
    "inotify_init1": (294, 26),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "io_uring_setup": (425, 425),
    "fallocate": (285, 47),
    "copy_file_range": (326, 285),
    "sendfile": (40, 71),
    "splice": (275, 76),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "process_vm_readv": (310, 270),
    "membarrier": (324, 283),
    "fadvise64": (221, 223),
    "utimensat": (280, 88),
    "fchmod": (91, 52),
    "linkat": (265, 37),
    "link": (86, None),
    "statfs": (137, 43),
    "prctl": (157, 167),
    "seccomp": (317, 277),
    "landlock_create_ruleset": (444, 444),
    "getcpu": (309, 168),
    "fsync": (74, 82),
}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_RET | BPF_K
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def deny(names: list[str], error: int) -> None:
    """Have these calls of this process, and of all that it starts, fail with an error.

    Raises:
        OSError: this system has no such filters.
    """
    column, architecture = _ARCHITECTURES[platform.machine()]
    numbers = [number for name in names if (number := NUMBERS[name][column]) is not None]
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, 0)]
    for number in numbers:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | error)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = _Program(len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for given in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*given):
            raise OSError(ctypes.get_errno(), "no filter of system calls")


if __name__ == "__main__":
    deny(sys.argv[2].split(","), getattr(errno, sys.argv[1]))
    os.execvp(sys.argv[4], sys.argv[4:])
