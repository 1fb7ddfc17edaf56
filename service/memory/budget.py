"""Divides the memory that a server may take between what requests make it hold.

The bound of all processes of a server together, in bytes, which no traffic takes it past (docs/security.md):

    start + documents + bodies + pixels + prompts + queue_size x row + max_connections x connection

`start` is what it takes when it is READY, with the buffers of all rows of its largest bucket; `documents` are
FastAPI and pydantic, 20 MiB, which the first request for the OpenAPI document imports; `prompts` is the process
that tokenizes them, with what a prompt may take there (`captioning/prompt_worker.py`); `row` is one picture of the
model's input size, 3 bytes a pixel; a connection holds a packet of 256 KiB, 64 KiB of a body and a head.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from snapcap.models.dataclass import dataclass
from snapcap.warmup.machine.capacity import MEMBERSHIP, MOUNTS, control_groups
from snapcap.warmup.machine.denied import process_limit

_FILES = ("memory.max", "memory.limit_in_bytes")  # cgroup version 2, and version 1
# More makes nothing faster: 32 bodies of 20 MiB, and more pictures of 50 million pixels than CPUs decode at a time.
_MOST_BODIES = 1 << 30
_MOST_PIXELS = 4 << 30


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that requests may make a server hold: `bodies` of requests on their way and until their images are
    decoded, `pixels` of images that are being decoded."""

    bodies: int
    pixels: int

    @classmethod
    def of(cls, limit: int) -> "MemoryBudget":
        """The shares of a server that may take `limit` bytes: a sixteenth for bodies and a quarter for pixels. The
        rest is the model's, and the interpreter's in each process."""
        return cls(min(limit // 16, _MOST_BODIES), min(limit // 4, _MOST_PIXELS))


def memory_limit(membership: Path = MEMBERSHIP, mounts: Path = MOUNTS) -> int:
    """Bytes that the processes of this server may take together: the least of the machine's memory, the limits of
    the control groups, as `docker run --memory` and Kubernetes set them, and RLIMIT_AS."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    address_space, _ = process_limit(resource.RLIMIT_AS)
    limits = [machine, *_group_limits(membership, mounts)]
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    return min(limits)


def _group_limits(membership: Path, mounts: Path) -> Iterator[int]:
    for group in control_groups("memory", membership, mounts):
        for name in _FILES:
            try:
                text = (group / name).read_text().strip()
                if text != "max":
                    yield int(text)
            except (OSError, ValueError):  # not there, or not as the kernel writes it
                continue
