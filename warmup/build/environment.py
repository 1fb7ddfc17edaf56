"""Sets up the compilers of a build: their variables, their own temporary folder, and torch's remote caches.

Compilers keep headers, objects and graphs for one another in folders below the temporary one, under names that
anybody on the machine can know, and take what they find there as it is. Whoever makes such a folder first has code
of theirs built into packages, which are signed. So all of it lies in a folder that nobody else may open.

torch's remote caches in Redis spare one machine what another has compiled or tuned. torch reads variables when it
is imported, so they are set before: for builds in their compilers, for jit in the server. Graphs are looked up by
jit only: torch leaves its graph caches out of ahead-of-time compilation, of which only Triton's autotuning is
looked up, so on a CPU a build has nothing there. Values from Redis are unpickled: anybody who can write to the
Redis server can run code here.
"""

import contextlib
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from snapcap.warmup.errors import StartError
from snapcap.warmup.machine.files import has_locks

# No pool of helpers: the workers are the pool, one thread each beside the compiler it calls. No line tables: they
# are four fifths of a package. And no test compilations of vector instructions that the CPU says it has: 15 to 50 s
# before a worker's first package (benchmarks/NOTES.md).
_COMPILER = {
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCH_WARM_POOL": "0",
    "AOT_INDUCTOR_ENABLE_LINE_TABLES": "0",
}
# Packages from which a precompiled header saves time: compiling the header takes as long as two or three packages.
_WORTH_A_HEADER = 8
# Packages from which an interface of its own saves time, of a build and for each of its compiler processes. On a
# CPU the interface takes as long as one or two packages save by it, and all compilers wait for it. On an H200, 16
# compilers made 18 packages in 36 s instead of 50.
_WORTH_AN_INTERFACE = 4
_WORTH_FOR_EACH = {"cpu": 2, "cuda": 1}
INTERFACE_FOLDER = "SNAPCAP_INTERFACE_FOLDER"  # variable of a compiler: where `build.interface` keeps objects


def compiler_environment(
    scratch: Path, device_type: str, packages: int, more: Mapping[str, str], compilers: int = 1
) -> dict[str, str]:
    """Returns the environment variables of a compiler process.

    Args:
        packages: the number of packages that the build has to make.
        more: variables that override the default ones, except those that name folders.
        compilers: the number of compiler processes of the build.
    """
    # Two compilers that embed the same kernel at once would write the same object file in Inductor's cache folder.
    # Without locks they would also write the same precompiled header.
    alone = device_type == "cuda" or not has_locks(scratch)
    folder = Path(tempfile.mkdtemp(dir=scratch)) if alone else scratch
    folders = {
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    header = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": str(int(packages >= _WORTH_A_HEADER))}
    apart = packages >= max(_WORTH_AN_INTERFACE, _WORTH_FOR_EACH[device_type] * compilers)
    interface = {INTERFACE_FOLDER: str(scratch) if apart else ""}
    return {**_COMPILER, **header, **more, **folders, **interface}


class _NoLock(contextlib.nullcontext[None]):
    """Takes the place of torch's lock on a file, and locks nothing."""

    def __init__(self, path: str, timeout: float = -1) -> None:
        super().__init__()


def skip_denied_locks(folder: Path) -> None:
    """Have Inductor lock no files in this process if there are no locks where its folder is.

    Inductor locks every file that it makes, and fails where flock is missing or denied. The locks only keep
    processes that share a folder apart, and here this process has its folder for itself. To be called before
    torch._inductor is imported.
    """
    if not has_locks(folder):
        from torch.utils import _filelock  # noqa: PLC0415  only a compiler needs torch

        vars(_filelock)["FileLock"] = _NoLock


def skip_vector_tests(device_type: str) -> None:
    """Compile host code for a GPU without vector instructions, once torch._inductor is imported.

    Before its first package a process compiles and loads up to four test programs, behind a lock that all processes
    share: 16 builders waited 60 to 130 s for each other (benchmarks/NOTES.md). On CUDA host code only launches
    kernels. TORCHINDUCTOR_VEC_ISA_OK does not help: the tests for AVX512-BF16, VNNI and AMX do not ask it.
    """
    if device_type == "cuda":
        from torch._inductor import cpu_vec_isa  # noqa: PLC0415  the compiler, which no other start imports

        cpu_vec_isa.supported_vec_isa_list.clear()


# Not BUNDLED_AUTOTUNE, which has the same results once more: it is part of torch's keys, so that a server with this
# cache could not use what one without it has published.
_GRAPHS = ("FX_GRAPH", "AUTOGRAD")
_TRITON = ("AUTOTUNE",)
# Seconds. Redis waits for ever by default, and a compiler would wait with it.
_TIMEOUTS = {"socket_connect_timeout": "2", "socket_timeout": "10"}

_logger = logging.getLogger("snapcap.build")


def remote_cache_environment(url: str, device: str) -> dict[str, str]:
    """The variables that turn torch's remote caches on; none where ``url`` is empty or Redis does not answer.
    ``device``: what is compiled for, cpu or cuda:N. Raises StartError if the package `redis` is not installed, or
    ``url`` is not one of Redis."""
    if not url:
        return {}
    try:
        import redis  # noqa: PLC0415  optional
    except ImportError:
        raise StartError("--remote-cache needs the package redis; run: pip install 'snapcap[redis]'") from None
    try:
        parts = urlsplit(url)
        query = {**_TIMEOUTS, **dict(parse_qsl(parts.query))}  # ours where the address has none of its own
        address = urlunsplit(parts._replace(query=urlencode(query)))
        client: Any = redis.Redis.from_url(address, retry=None)
    except ValueError as error:
        raise StartError(f"--remote-cache: {error}") from None
    try:
        client.ping()
    except (redis.RedisError, OSError) as error:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # without user and password
        fields = {"redis": shown, "error": str(error)}
        _logger.warning("remote cache not used: Redis does not answer", extra={"fields": fields})
        return {}
    finally:
        client.close()
    caches = _GRAPHS if device == "cpu" else _GRAPHS + _TRITON
    return {
        "TORCHINDUCTOR_REDIS_URL": address,
        **{f"TORCHINDUCTOR_{cache}_REMOTE_CACHE": "1" for cache in caches},
    }
