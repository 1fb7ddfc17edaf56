"""Enables torch's own remote caches in Redis: what one machine has compiled or tuned, another need not.

torch reads variables when it is imported, so they are set before: for builds in their compilers, for jit in the
server. Graphs are looked up by jit only: torch leaves its graph caches out of ahead-of-time compilation, of which
only Triton's autotuning is looked up, so on a CPU a build has nothing there.

Values from Redis are unpickled: anybody who can write to the Redis server can run code here.
"""

import logging
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from snapcap.warmup.errors import StartError

# Not BUNDLED_AUTOTUNE, which has the same results once more: it is part of torch's keys, so that a server with this
# cache could not use what one without it has published.
_GRAPHS = ("FX_GRAPH", "AUTOGRAD")
_TRITON = ("AUTOTUNE",)
# Seconds. Redis waits for ever by default, and a compiler would wait with it.
_TIMEOUTS = {"socket_connect_timeout": "2", "socket_timeout": "10"}

_logger = logging.getLogger("snapcap.build")


def remote_cache_environment(url: str, device: str) -> dict[str, str]:
    """The variables that turn torch's remote caches on; none where ``url`` is empty or Redis does not answer.

    Args:
        device: what is compiled for, cpu or cuda:N.

    Raises:
        StartError: the package `redis` is not installed, or ``url`` is not one of Redis.
    """
    if not url:
        return {}
    try:
        import redis  # noqa: PLC0415  optional
    except ImportError:
        raise StartError("--remote-cache needs the package redis; run: pip install 'snapcap[redis]'") from None
    try:
        address = _with_timeouts(url)
        client: Any = redis.Redis.from_url(address, retry=None)
    except ValueError as error:
        raise StartError(f"--remote-cache: {error}") from None
    try:
        client.ping()
    except (redis.RedisError, OSError) as error:
        fields = {"redis": _location(url), "error": str(error)}
        _logger.warning("remote cache not used: Redis does not answer", extra={"fields": fields})
        return {}
    finally:
        client.close()
    caches = _GRAPHS if device == "cpu" else _GRAPHS + _TRITON
    return {
        "TORCHINDUCTOR_REDIS_URL": address,
        **{f"TORCHINDUCTOR_{cache}_REMOTE_CACHE": "1" for cache in caches},
    }


def _with_timeouts(url: str) -> str:
    """Our timeouts, where the address has none of its own."""
    parts = urlsplit(url)
    query = {**_TIMEOUTS, **dict(parse_qsl(parts.query))}
    return urlunsplit(parts._replace(query=urlencode(query)))


def _location(url: str) -> str:
    """The address without user and password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
