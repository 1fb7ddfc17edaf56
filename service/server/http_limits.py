"""Chooses the limits of the HTTP server, where they are not given, from the memory and the files it may have."""

import logging
import resource

from snapcap.service.api.bodies.body import BodyLimits
from snapcap.service.config.http_settings import HttpLimits
from snapcap.service.edge.connections import SPARE, ConnectionLimits
from snapcap.service.memory.bodies import BodyBudget
from snapcap.service.memory.budget import MemoryBudget, memory_limit
from snapcap.service.telemetry.metrics import Metrics
from snapcap.warmup.machine.denied import process_limit

# A connection holds less than 1 MiB: a packet of 256 KiB, 64 KiB of a body, heads, and the buffers of the kernel.
_MEMORY_OF_CONNECTION = 4 << 20
_MOST_CONNECTIONS = 4096
# Of open files those that are not connections: pipes of the other processes, images fetched, packages.
_OTHER_FILES = 256
_USUAL_FILES = 1024
_logger = logging.getLogger("snapcap.server")


def body_limits(limits: HttpLimits, metrics: Metrics) -> BodyLimits:
    """The limits of bodies; their memory is on the metrics from now on."""
    budget = BodyBudget(limits.max_body_memory or MemoryBudget.of(memory_limit()).bodies)
    metrics.body_memory.set_function(lambda: budget.held)
    metrics.body_memory_limit.set(budget.limit)
    return BodyLimits(limits.max_body_bytes, limits.body_timeout, limits.body_total_timeout, budget)


def connection_limits(limits: HttpLimits) -> ConnectionLimits:
    """The limits of connections. Raises how many files this process may open, as far as they need."""
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
    """How many files this process may have open, after an attempt to make that as many as `count`."""
    soft, hard = process_limit(resource.RLIMIT_NOFILE, _USUAL_FILES)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a sandbox
        return soft
    return wanted
