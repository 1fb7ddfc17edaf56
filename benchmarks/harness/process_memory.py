"""Adds up the memory of a process and all below it, each shared page once."""

from pathlib import Path

from snapcap.benchmarks.harness.processes import descendants


def tree_memory(pid: int) -> int:
    """Bytes of ``pid`` and its descendants; 0 where none lives."""
    return sum(process_memory(each) for each in (pid, *(child for child, _ in descendants(pid))))


def process_memory(pid: int) -> int:
    """Bytes of one process: its proportional set size, in which a page that n processes share counts 1/n. Where the
    kernel does not tell that, its resident set size. 0 when it has ended."""
    for name, field in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            text = Path(f"/proc/{pid}/{name}").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        for line in text.splitlines():
            if line.startswith(field):
                return int(line.split()[1]) << 10
    return 0
