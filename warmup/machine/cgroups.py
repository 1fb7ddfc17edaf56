"""Finds the files of the control groups that this process is in. No torch.

cgroups(7): version 2 has one tree for all controllers, version 1 one tree for each. `cpus.py` looks there for
CPUs, the service's budget for memory.
"""

from collections.abc import Iterator
from pathlib import Path

MOUNTS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def control_groups(controller: str, membership: Path = MEMBERSHIP, mounts: Path = MOUNTS) -> Iterator[Path]:
    """The folders of the process's groups of a controller, and of those around them, whose limits hold as well.

    A container may see its own group as the root, whatever it is called outside, so a folder may not be there.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not on Linux
        return
    for line in lines:
        number, controllers, name = line.split(":", 2)
        if number == "0" and not controllers:
            roots = (mounts, mounts / "unified")
        elif controller in controllers.split(","):
            roots = (mounts / controllers, mounts / controller)
        else:
            continue
        group = Path(name.lstrip("/"))
        yield from (root / part for root in roots for part in (group, *group.parents))
