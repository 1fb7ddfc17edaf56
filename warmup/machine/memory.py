"""Finds how much memory processes beside this one may take before somebody is killed for it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from snapcap.warmup.machine.cgroups import MEMBERSHIP, MOUNTS, control_groups

# Files of control groups, version 2 and 1: the limit, the usage, and the names in memory.stat of the pages of
# files, which the kernel gives back at need.
_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)


def free_memory(membership: Path = MEMBERSHIP, mounts: Path = MOUNTS) -> int:
    """Bytes: the least that the machine and the control groups of this process have left."""
    return min([_machine_memory(), *_group_memory(membership, mounts)])


def first_for_the_oom_killer() -> None:
    """Have this process killed before others where memory runs out all the same."""
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("1000")


def _machine_memory() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):  # not Linux
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_memory(membership: Path, mounts: Path) -> Iterator[int]:
    for group in control_groups("memory", membership, mounts):
        for limit, used, pages in _FILES:
            try:
                most = (group / limit).read_text().strip()
                if most == "max":
                    continue
                lines = (group / "memory.stat").read_text().splitlines()
                counts = dict(line.split() for line in lines)
                files = sum(int(counts[name]) for name in pages)
                yield max(0, int(most) - int((group / used).read_text()) + files)
            except (OSError, ValueError, KeyError):  # not there, or not as the kernel writes it
                continue
