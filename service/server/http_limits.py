"""Chooses limits of the HTTP server that no option sets, from the memory and open files that it may have."""

import logging
import resource

from snapcap.service.config.settings import HttpLimits
from snapcap.service.http.bodies import BodyLimits
from snapcap.service.http.connections import SPARE, ConnectionLimits
from snapcap.service.memory import BodyBudget, MemoryBudget, memory_limit
from snapcap.service.telemetry.metrics import Metrics
from snapcap.warmup.machine.denied import process_limit

# Bytes of memory for which one connection is allowed. A connection holds less than 1 MiB: a packet of 256 KiB, 64
# KiB of a body, heads, and the buffers of the kernel.
_MEMORY_OF_CONNECTION = 4 << 20
_MOST_CONNECTIONS = 4096
# Number of open files beside the connections: pipes of the other processes, images that are fetched, packages.
_OTHER_FILES = 256
_USUAL_FILES = 1024
_logger = logging.getLogger("snapcap.server")


def body_limits(limits: HttpLimits, metrics: Metrics) -> BodyLimits:
    """Returns the limits of bodies, and adds the memory of bodies to the metrics."""
    budget = BodyBudget(limits.max_body_memory or MemoryBudget.of(memory_limit()).bodies)
    metrics.body_memory.set_function(lambda: budget.held)
    metrics.body_memory_limit.set(budget.limit)
    return BodyLimits(limits.max_body_bytes, limits.body_timeout, limits.body_total_timeout, budget)


def connection_limits(limits: HttpLimits) -> ConnectionLimits:
    """Returns the limits of connections. Raises the number of files that this process may open, if they need it."""
    wanted = limits.max_connections or max(1, min(_MOST_CONNECTIONS, memory_limit() // _MEMORY_OF_CONNECTION))
    files = _allow_files(wanted + SPARE + _OTHER_FILES)
    possible = min(wanted, max(files - SPARE - _OTHER_FILES, files // 2))
    if possible < wanted and limits.max_connections:
        fields = {"wanted": wanted, "possible": possible, "open_files": files}
        _logger.warning("fewer connections than --max-connections: raise `ulimit -n`", extra={"fields": fields})
    return ConnectionLimits(
        possible,
        limits.max_header_bytes,
        limits.max_headers,
        limits.header_timeout,
        limits.keep_alive_timeout,
        limits.send_timeout,
    )


def _allow_files(count: int) -> int:
    """Tries to raise the limit of open files to `count`. Returns the number of files that may be open, at most
    `count`."""
    soft, hard = process_limit(resource.RLIMIT_NOFILE, _USUAL_FILES)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a sandbox forbids it
        return soft
    return wanted
