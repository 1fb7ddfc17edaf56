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
        if os.getpid() == 1:  # the kernel drops signals to process 1 that have no handler
            signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
        return _run()
    except KeyboardInterrupt:
        print("snapcap: interrupted", file=sys.stderr)
        return 130


def _run() -> int:
    import_only_what_is_installed()
    engine = None
    if sys.argv[1:2] == ["serve"] and not _HELP.intersection(sys.argv):
        from snapcap.service.server.processes import fork_engine  # noqa: PLC0415  other commands do not need it

        with contextlib.suppress(OSError):  # `serve` tries again, and reports the error
            engine = fork_engine()
    from snapcap.service.cli.main import main as run  # noqa: PLC0415  imported while the engine process imports too

    return run(sys.argv[1:], engine)


def _open_standard_files() -> None:
    """Opens the null device in place of each standard file that is closed. Otherwise a socket or shared memory
    would get its number, and native code would print into it."""
    while (file := os.open(os.devnull, os.O_RDWR)) < len(_STANDARD):
        os.set_inheritable(file, True)
    os.close(file)
    for number, (name, mode) in enumerate(_STANDARD):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  stays open until the process ends
