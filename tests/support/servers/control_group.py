"""Makes a memory control group as a container has it, and runs a server inside.

Run as a program it joins the group, then is `snapcap`.

python -P control_group.py GROUP_PROCS_FILE serve …
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = ("-P", __file__)
_VERSION_1, _VERSION_2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """The folder of a new group that may take ``limit`` bytes. Skips the test where none can be made."""
    root = _VERSION_1 if _VERSION_1.is_dir() else _VERSION_2
    name = "memory.limit_in_bytes" if root == _VERSION_1 else "memory.max"
    group = root / f"snapcap-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"NO MEMORY CONTROL GROUP CAN BE MADE HERE ({error.strerror}): NO SERVER RUNS UNDER A LIMIT")
    try:
        yield group
    finally:
        end = time.monotonic() + 30  # the processes of a server that was killed end one after the other
        while (group / "cgroup.procs").read_text() and time.monotonic() < end:
            time.sleep(0.05)
        group.rmdir()


def kills(group: Path) -> int:
    """How many of its processes the kernel has killed for memory."""
    for name in ("memory.events", "memory.oom_control"):
        if (group / name).exists():
            counts = dict(line.split() for line in (group / name).read_text().splitlines())
            return int(counts["oom_kill"])
    raise OSError(f"{group} counts no kills")


if __name__ == "__main__":
    Path(sys.argv.pop(1)).write_text(str(os.getpid()))
    from snapcap.service.cli.entry import main

    sys.exit(main())
