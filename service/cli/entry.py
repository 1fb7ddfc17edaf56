"""Starts the `snapcap` command: forks the engine process of a server, then imports and runs the command line."""

import contextlib
import os
import signal
import sys

from snapcap.warmup.machine.own_imports import import_only_what_is_installed

_HELP = {"-h", "--help", "--help-all"}
_STANDARD = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def main() -> int:
    """Runs this process's command line; returns its exit status."""
    try:
        _open_standard_files()
        if os.getpid() == 1:  # to which the kernel gives no signal that it does not handle
            signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
        return _run()
    except KeyboardInterrupt:
        print("snapcap: interrupted", file=sys.stderr)
        return 130


def _run() -> int:
    import_only_what_is_installed()
    engine = None
    if sys.argv[1:2] == ["serve"] and not _HELP.intersection(sys.argv):
        from snapcap.service.server.processes import fork_engine  # noqa: PLC0415  for this command alone

        with contextlib.suppress(OSError):  # `serve` tries once more, and says what is wrong
            engine = fork_engine()
    from snapcap.service.cli.main import main as run  # noqa: PLC0415  while that process imports

    return run(sys.argv[1:], engine)


def _open_standard_files() -> None:
    """Those that are closed are the null device. Or sockets and shared memory have their numbers, and what native
    code prints is written there."""
    while (file := os.open(os.devnull, os.O_RDWR)) < len(_STANDARD):
        os.set_inheritable(file, True)
    os.close(file)
    for number, (name, mode) in enumerate(_STANDARD):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  for as long as the process lives
