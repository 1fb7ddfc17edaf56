"""Counts the CPUs and the memory that this process may use, and lists the instructions of its CPUs.

The kernel keeps the limits of a container in control groups. cgroups(7): version 2 has one tree for all
controllers, version 1 one tree for each controller.
"""

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

MOUNTS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
CPUINFO = Path("/proc/cpuinfo")


def control_groups(controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control group and of its parent groups, whose limits apply too.

    A container may see its own group as the root of the tree, so a yielded folder may not exist."""
    try:
        lines = os.fsdecode(MEMBERSHIP.read_bytes()).split("\n")
    except OSError:  # not on Linux
        return
    for line in filter(None, lines):
        number, controllers, name = line.split(":", 2)
        if number == "0" and not controllers:
            roots = (MOUNTS, MOUNTS / "unified")
        elif controller in controllers.split(","):
            roots = (MOUNTS / controllers, MOUNTS / controller)
        else:
            continue
        group = Path(name.lstrip("/"))
        yield from (root / part for root in roots for part in (group, *group.parents))


# Flags of the instructions that a compiler emits with -march=native: vector, matrix, bit and half-float
# instructions. Flags of the kernel and of the hypervisor would only make machines of the same kind look different.
_X86 = re.compile(
    r"sse\d?(_\d)?|pni|ssse3|sse4a|avx.*|amx.*|fma4?|f16c|bmi\d|abm|lzcnt|popcnt|movbe|adx|tbm|xop|cx16|"
    r"aes|vaes|pclmulqdq|vpclmulqdq|gfni|sha_ni|sha512|sm3|sm4|lahf_lm|3dnowprefetch|movdiri|movdir64b|apx.*"
)
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})
_ARM = re.compile(r"(?!cpuid|evtstrm|paca|pacg|bti|ssbs|sb|dit|dcpop|dcpodp|mte\d?$).*")


def available_cpus() -> int:
    """Returns the CPUs that this process may use: its affinity, and at most a container's limit, rounded up."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on Linux, or denied
        cpus = os.cpu_count() or 1
    limit = cpu_limit()
    return cpus if limit is None else min(cpus, max(math.ceil(limit), 1))


def cpu_limit() -> float | None:
    """Returns the limit of CPU time of this process's control groups, in CPUs; None without a limit. `docker run
    --cpus` and Kubernetes set it. The limit of a group also applies to the groups in it.

    The files are `cpu.max` of version 2, and `cpu.cfs_quota_us` and `cpu.cfs_period_us` of version 1."""
    return min((limit for group in control_groups("cpu") for limit in _limits(group)), default=None)


def whole_cpus() -> int:
    """Returns the available CPUs with a container's limit rounded down, but at least one. Threads that wait for
    each other would waste a CPU of which they have only a part."""
    limit = cpu_limit()
    return available_cpus() if limit is None else max(min(available_cpus(), math.floor(limit)), 1)


def all_but_one() -> int:
    """Returns the number of CPUs less one, which is left to HTTP and image decoding."""
    return max(available_cpus() - 1, 1)


def multiplies_bfloat16() -> bool:
    """Returns whether this x86 processor has bfloat16 instructions, which double the speed of matrix products."""
    return not _BFLOAT16.isdisjoint(instruction_set())


def instruction_set() -> list[str]:
    """Returns the sorted names of the processor's instruction set extensions, as the kernel lists them.

    Linux on x86 and ARM always lists them. Any other machine shares artifacts with machines of the same processor
    name."""
    import platform  # noqa: PLC0415 - few callers of this module need it

    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for label, relevant in (("flags", _X86), ("Features", _ARM)):
        found = re.search(rf"^{label}\s*:(.*)$", text, re.MULTILINE)
        if found:
            return sorted({flag for flag in found[1].split() if relevant.fullmatch(flag)})
    return [platform.processor() or "unknown"]


def _limits(group: Path) -> Iterator[float]:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = (word for name in names for word in (group / name).read_text().split())
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):  # a missing file, or an unknown format
            continue


# Files of control groups, version 2 and 1: the limit, the usage, and the names in memory.stat of the pages of
# files, which the kernel gives back at need.
_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)


def free_memory() -> int:
    """Returns the free bytes of memory: the least of the machine's and of this process's control groups."""
    return min([_machine_memory(), *_group_memory()])


def first_for_the_oom_killer(score: int = 1000) -> None:
    """Make the OOM killer choose this process before others with a lower score (at most 1000)."""
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text(str(score))


def _machine_memory() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):  # not Linux
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_limits() -> Iterator[tuple[int, Path, str, tuple[str, str]]]:
    """Yields each limit of memory in bytes, the folder of its control group, and the names of ``_FILES`` for the
    usage and the pages of files."""
    for group in control_groups("memory"):
        for limit, used, pages in _FILES:
            with contextlib.suppress(OSError, ValueError):  # a missing file, or "max": no limit
                yield int((group / limit).read_text()), group, used, pages


def _group_memory() -> Iterator[int]:
    for limit, group, used, pages in memory_limits():
        with contextlib.suppress(OSError, ValueError, KeyError):  # a missing file, or an unknown format
            lines = (group / "memory.stat").read_text().splitlines()
            counts = dict(line.split() for line in lines)
            files = sum(int(counts[name]) for name in pages)
            yield max(0, limit - int((group / used).read_text()) + files)
