"""Lists the instructions of this CPU that compiled code may use."""

import platform
import re
from pathlib import Path

# What a compiler told -march=native emits by itself: vector, matrix, bit and half-float instructions. Flags of the
# kernel and of the hypervisor would only make machines of the same kind look different.
_X86 = re.compile(
    r"sse\d?(_\d)?|pni|ssse3|sse4a|avx.*|amx.*|fma4?|f16c|bmi\d|abm|lzcnt|popcnt|movbe|adx|tbm|xop|cx16|"
    r"aes|vaes|pclmulqdq|vpclmulqdq|gfni|sha_ni|sha512|sm3|sm4|lahf_lm|3dnowprefetch|movdiri|movdir64b|apx.*"
)
_ARM = re.compile(r"(?!cpuid|evtstrm|paca|pacg|bti|ssbs|sb|dit|dcpop|dcpodp|mte\d?$).*")


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Sorted names of the instruction set extensions, as the kernel lists them.

    A machine that does not say, which is none that runs Linux on x86 or ARM, shares artifacts with its like only
    by processor name.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for label, relevant in (("flags", _X86), ("Features", _ARM)):
        found = re.search(rf"^{label}\s*:(.*)$", text, re.MULTILINE)
        if found:
            return sorted({flag for flag in found[1].split() if relevant.fullmatch(flag)})
    return [platform.processor() or "unknown"]
