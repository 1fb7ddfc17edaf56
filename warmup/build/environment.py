"""Sets up the compilers of a build: variables, a temporary folder, the shared interface, torch's remote caches.

Compilers share headers, objects and graphs in subfolders of the temporary folder, under predictable names, and
trust their content. Another user who made such a folder first could put code into signed packages. So a build uses
a temporary folder that only this user can open.

Inductor writes two C++ sources for a package: the kernels, and a wrapper that calls them. A wrapper begins with the
interface, the exported C functions, which is the same text in every package, and ends with the package's own model.
The interface takes the compiler longer than the model. So the first compiler process that needs the interface
compiles it to an object in the build's temporary folder, and every package joins that object with the object of its
model. If any of these steps fails, Inductor compiles the whole wrapper.

torch's remote caches in Redis save one machine from compiling or tuning what another machine has done. torch reads
variables when it is imported, so they are set earlier: in a build's compilers, and in a server with jit. Only jit
looks up graphs: ahead-of-time compilation looks up only Triton's autotuning, so a build for a CPU finds nothing.
torch unpickles values from Redis: whoever can write to the Redis server can run code here.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from snapcap.warmup.errors import StartError
from snapcap.warmup.machine.files import has_locks

# No pool of compile threads: each worker is a process with one thread. No line tables: they are four fifths of a
# package. No test compilations for the CPU's vector instructions: they take 15 to 50 s before a worker's first
# package (benchmarks/NOTES.md).
_COMPILER = {
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCH_WARM_POOL": "0",
    "AOT_INDUCTOR_ENABLE_LINE_TABLES": "0",
}
# Least packages for which a precompiled header saves time: the header takes as long as two or three packages.
_WORTH_A_HEADER = 8
# Least packages of a build, and of each compiler process, for which a separate interface saves time. On a CPU,
# compiling the interface takes the time that one or two packages save, and all compilers wait for it. On an H200,
# 16 compilers made 18 packages in 36 s instead of 50.
_WORTH_AN_INTERFACE = 4
_WORTH_FOR_EACH = {"cpu": 2, "cuda": 1}
INTERFACE_FOLDER = "SNAPCAP_INTERFACE_FOLDER"  # variable of a compiler: the folder of compiled interfaces


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
    """Replaces torch's file lock, and locks nothing."""

    def __init__(self, path: str, timeout: float = -1) -> None:
        super().__init__()


def skip_denied_locks(folder: Path) -> None:
    """Make Inductor lock no files in this process, if the file system of its folder has no locks.

    Inductor locks every file that it writes, and fails if flock is missing or denied. The locks only protect
    folders that processes share, and this process has its own folder. Call this before importing torch._inductor.
    """
    if not has_locks(folder):
        from torch.utils import _filelock  # noqa: PLC0415  only a compiler needs torch

        vars(_filelock)["FileLock"] = _NoLock


def skip_vector_tests(device_type: str) -> None:
    """Make Inductor compile a GPU's host code without vector instructions. Call this after importing
    torch._inductor.

    Otherwise each process compiles and loads up to four test programs before its first package, under a lock that
    all processes share: 16 builders waited 60 to 130 s (benchmarks/NOTES.md). On CUDA, host code only launches
    kernels. TORCHINDUCTOR_VEC_ISA_OK does not help: the tests for AVX512-BF16, VNNI and AMX ignore it."""
    if device_type == "cuda":
        from torch._inductor import cpu_vec_isa  # noqa: PLC0415  the compiler, which no other start imports

        cpu_vec_isa.supported_vec_isa_list.clear()


_INCLUDE = re.compile(r"^#include.*\n", re.MULTILINE)
# The class template that the interface and a model share. `extern` leaves its code to the interface's object.
_SHARED_CODE = "namespace torch::aot_inductor {{ {}template class AOTInductorModelBase<AOTInductorModel>; }}\n"


def share_interface() -> None:
    """Make Inductor compile wrappers with `compile_apart` in this process, if the environment names a folder."""
    folder = os.environ.get(INTERFACE_FOLDER)
    if not folder:
        return
    from torch._inductor import cpp_builder  # noqa: PLC0415  only a compiler needs torch

    interface = Path(cpp_builder.__file__).parent / "codegen" / "aoti_runtime" / "interface.cpp"
    text = interface.read_text(encoding="utf-8").strip()
    builder_class: Any = cpp_builder.CppBuilder
    build_whole = builder_class.build

    def build(builder: Any) -> None:
        if not compile_apart(shlex.split(builder.get_command_line()), text, Path(folder)):
            build_whole(builder)

    builder_class.build = build


def compile_apart(command: Sequence[str], interface: str, folder: Path) -> bool:
    """Compile a wrapper's interface and model separately, and join both objects.

    Args:
        command: compiler, source, options, ``-c -o`` and the object.
        interface: the source text that all wrappers share.
        folder: keeps compiled interfaces for the other compiler processes of the build.

    Returns:
        False if the command compiles no wrapper with this interface, or if a compilation failed. Then there is no
        object.
    """
    source, output = Path(command[1]), Path(command[-1])
    if not source.name.endswith(".wrapper.cpp") or command[-3:-1] != ["-c", "-o"]:
        return False
    before, found, model = source.read_text(encoding="utf-8").partition(interface)
    if not found:
        return False
    compiler, options = command[0], list(command[2:-1])
    text = f"{before}{interface}\n{_SHARED_CODE.format('')}"
    shared = _compiled_once([compiler, *options], text, folder, output.parent)
    own_source, own = source.with_name(f"own.{source.name}"), output.with_name(f"own.{output.name}")
    headers = "".join(_INCLUDE.findall(interface))
    own_source.write_text(f"{before}{headers}{_SHARED_CODE.format('extern ')}{model}", encoding="utf-8")
    return (
        shared is not None
        and _succeeds([compiler, str(own_source), *options, str(own)], output.parent)
        and _succeeds([compiler, "-r", "-nostdlib", str(own), str(shared), "-o", str(output)], output.parent)
    )


def _compiled_once(command: Sequence[str], text: str, folder: Path, within: Path) -> Path | None:
    """Returns the object of a source, which the first process that needs it compiles; None if that fails.

    ``command``: the compiler and its options up to ``-o``, without source and object."""
    name = hashlib.sha256("\0".join([*command, text]).encode()).hexdigest()[:16]
    source, made = folder / f"interface-{name}.cpp", folder / f"interface-{name}.o"
    failed, part = made.with_suffix(".failed"), made.with_suffix(f".{os.getpid()}.o")
    with made.with_suffix(".lock").open("w") as lock:
        with contextlib.suppress(OSError):  # without locks several processes may compile it
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists() and not failed.exists():
            source.write_text(text, encoding="utf-8")
            if _succeeds([command[0], str(source), *command[1:], str(part)], within):
                part.replace(made)
            else:
                failed.touch()
    return made if made.exists() else None


def _succeeds(command: Sequence[str], within: Path) -> bool:
    """Run a compiler in a folder. Its messages are dropped: after a failure the whole wrapper is compiled."""
    done = subprocess.run(command, cwd=within, capture_output=True, check=False)  # noqa: S603  the compiler that compiles packages too
    return done.returncode == 0


# BUNDLED_AUTOTUNE is not set: it duplicates these results and is part of torch's keys, so a server with this cache
# could not use artifacts that a server without it has published.
_GRAPHS = ("FX_GRAPH", "AUTOGRAD")
_TRITON = ("AUTOTUNE",)
# Timeouts of Redis in seconds. By default it waits for ever, and so would a compiler.
_TIMEOUTS = {"socket_connect_timeout": "2", "socket_timeout": "10"}

_logger = logging.getLogger("snapcap.build")


def remote_cache_environment(url: str, device: str) -> dict[str, str]:
    """Returns the variables that turn on torch's remote caches; empty if ``url`` is empty or Redis does not answer.
    ``device``: the target of the compilation, cpu or cuda:N. Raises StartError if the package `redis` is not
    installed, or ``url`` is no URL of Redis."""
    if not url:
        return {}
    try:
        import redis  # noqa: PLC0415  optional
    except ImportError:
        raise StartError("--remote-cache needs the package redis; run: pip install 'snapcap[redis]'") from None
    try:
        parts = urlsplit(url)
        query = {**_TIMEOUTS, **dict(parse_qsl(parts.query))}  # the URL's own timeouts override these
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
    return {"TORCHINDUCTOR_REDIS_URL": address, **{f"TORCHINDUCTOR_{cache}_REMOTE_CACHE": "1" for cache in caches}}
