"""How many CPUs there are, and how many of them one operation takes. No torch."""

import os


def available_cpus() -> int:
    """CPUs this process may use; in a container, what its affinity leaves."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def default_threads() -> int:
    """All CPUs but one, which is left to HTTP and image decoding.

    The threads of an operation wait for each other, so where one of them has to wait for a CPU all do: with 2
    threads on 2 CPUs a server under load answered two thirds of what it did with 1, and next to nothing where they
    spin (benchmarks/README.md).
    """
    return max(available_cpus() - 1, 1)
