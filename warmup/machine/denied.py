"""Replaces system calls that this machine denies and that only save work or memory, and logs each denial once."""

import contextlib
import fcntl
import functools
import logging
import os
from collections.abc import Iterator

_OTHER_FOLDERS = ("/dev/shm", "/var/tmp")  # noqa: S108 - nobody else can open what is made there
_NO_LIMIT = -1  # resource.RLIM_INFINITY
_logger = logging.getLogger("snapcap.machine")


@functools.cache
def report_denied(what: str, effect: str, reason: str) -> None:
    """Logs the first denial of a call in this process.

    Args:
        what: the call that the system denies, such as "flock".
        effect: the consequence for this program.
        reason: the system's error.
    """
    _logger.warning("%s is not available: %s", what, effect, extra={"fields": {"reason": reason}})


def process_limit(which: int, unknown: int = _NO_LIMIT) -> tuple[int, int]:
    """Returns the soft and the hard limit of a resource, which is one of ``resource.RLIMIT_…``. If the system does
    not tell, both limits are ``unknown``."""
    import resource  # noqa: PLC0415 - the module is missing where torch's libraries are loaded

    try:
        return resource.getrlimit(which)
    except OSError as error:
        report_denied("getrlimit", "usual limits are assumed", str(error.strerror))
        return unknown, unknown


def memory_file(name: str, *, runs: bool = False) -> int:
    """Returns the descriptor of a new file that no other program can open, which ends with its last descriptor.
    Raises OSError if no memory and no temporary folder has room for the file.

    Args:
        name: the file's name in the system's lists.
        runs: True if code in the file is executed.
    """
    reason = "it is a call of Linux"
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except AttributeError:
        pass
    except OSError as error:
        reason = str(error.strerror)
        report_denied("memfd_create", "files of a temporary folder are used instead", reason)
    from tempfile import TemporaryFile  # noqa: PLC0415 - few starts need it

    for folder in _folders(runs):
        with contextlib.suppress(OSError), TemporaryFile(dir=folder) as file:
            return os.dup(file.fileno())
    raise OSError(f"no file in memory ({reason}), and no temporary folder can be used instead; set TMPDIR")


@contextlib.contextmanager
def library_file(content: bytes) -> Iterator[str]:
    """Yields a path from which a library can be loaded inside the block. A loaded library stays usable. Raises
    OSError if no memory or folder has room for it."""
    if not os.path.isdir("/proc/self/fd"):  # another system than Linux
        from tempfile import NamedTemporaryFile  # noqa: PLC0415 - few starts need it

        with NamedTemporaryFile(prefix="snapcap-", suffix=".so") as file:
            file.write(content)
            file.flush()
            yield file.name
        return
    descriptor = memory_file("snapcap-library", runs=True)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as memory:
            memory.write(content)
    except OSError:
        os.close(descriptor)
        raise
    # The descriptor stays open. The linker knows a library by its name: another library with the same descriptor
    # number would be taken for this one.
    yield f"/proc/self/fd/{descriptor}"


def seal(file: int) -> None:
    """Fixes the size of a file of `memory_file` for good, so that no process can cut a file that another process
    has mapped, or fill the memory. A file of a temporary folder cannot be sealed."""
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def is_sealed(file: int) -> bool:
    with contextlib.suppress(OSError, AttributeError):
        return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_GROW)
    return False


def _folders(runs: bool) -> Iterator[str]:
    """Yields temporary folders that may exist; if code in the file is executed, only folders that allow it."""
    from tempfile import gettempdir  # noqa: PLC0415 - few starts need it

    folders = list(_OTHER_FOLDERS)
    with contextlib.suppress(OSError):
        folders.insert(0, gettempdir())
    for folder in folders:
        if not (runs and _forbids_code(folder)):
            yield folder


def _forbids_code(folder: str) -> bool:
    """Returns whether the file system of a folder is mounted with `noexec`."""
    with contextlib.suppress(OSError):
        return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)
    return False
