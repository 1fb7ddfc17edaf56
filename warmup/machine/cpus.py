"""Counts the CPUs that this process may use, and lists their instructions.

No torch.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from snapcap.warmup.machine.cgroups import MEMBERSHIP, MOUNTS, control_groups

# Flags of the instructions that a compiler emits with -march=native: vector, matrix, bit and half-float
# instructions. Flags of the kernel and of the hypervisor would only make machines of the same kind look different.
_X86 = re.compile(
    r"sse\d?(_\d)?|pni|ssse3|sse4a|avx.*|amx.*|fma4?|f16c|bmi\d|abm|lzcnt|popcnt|movbe|adx|tbm|xop|cx16|"
    r"aes|vaes|pclmulqdq|vpclmulqdq|gfni|sha_ni|sha512|sm3|sm4|lahf_lm|3dnowprefetch|movdiri|movdir64b|apx.*"
)
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})
_ARM = re.compile(r"(?!cpuid|evtstrm|paca|pacg|bti|ssbs|sb|dit|dcpop|dcpodp|mte\d?$).*")


def available_cpus() -> int:
    """CPUs this process may use: those of its affinity, and in a container no more than its limit, rounded up."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on Linux, or denied
        cpus = os.cpu_count() or 1
    limit = cpu_limit()
    return cpus if limit is None else min(cpus, max(math.ceil(limit), 1))


def cpu_limit(membership: Path = MEMBERSHIP, mounts: Path = MOUNTS) -> float | None:
    """The CPUs' worth of time that control groups give this process, as `docker run --cpus` and Kubernetes' limits
    set it; None without a limit. A group's is also that of the groups in it.

    `cpu.max` of version 2, `cpu.cfs_quota_us` and `cpu.cfs_period_us` of version 1.
    """
    groups = control_groups("cpu", membership, mounts)
    return min((limit for group in groups for limit in _limits(group)), default=None)


def whole_cpus() -> int:
    """The same, but a limit is rounded down, as threads that wait for each other use up one that they share; at
    least one."""
    limit = cpu_limit()
    return available_cpus() if limit is None else max(min(available_cpus(), math.floor(limit)), 1)


def all_but_one() -> int:
    """All CPUs but one, which is left to HTTP and image decoding."""
    return max(available_cpus() - 1, 1)


def multiplies_bfloat16() -> bool:
    """Returns whether this x86 processor has bfloat16 instructions, which double the speed of matrix products."""
    return not _BFLOAT16.isdisjoint(instruction_set())


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Sorted names of the instruction set extensions, as the kernel lists them.

    Linux on x86 and ARM always lists them. Any other machine shares artifacts with machines of the same processor
    name.
    """
    import platform  # noqa: PLC0415 - few callers of this module need it

    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
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
        except (OSError, ValueError, ZeroDivisionError):  # not there, or not as the kernel writes it
            continue
