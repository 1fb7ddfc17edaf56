"""Starts the `snapcap` command: forks the engine process of a server, then imports and runs the command line."""

import contextlib
import sys

from snapcap.warmup.machine.own_imports import import_only_what_is_installed

_HELP = {"-h", "--help", "--help-all"}


def main() -> int:
    """Runs this process's command line; returns its exit status."""
    import_only_what_is_installed()
    engine = None
    if sys.argv[1:2] == ["serve"] and not _HELP.intersection(sys.argv):
        from snapcap.service.server.processes import fork_engine  # noqa: PLC0415  for this command alone

        with contextlib.suppress(OSError):  # `serve` tries once more, and says what is wrong
            engine = fork_engine()
    from snapcap.service.cli.main import main as run  # noqa: PLC0415  while that process imports

    return run(sys.argv[1:], engine)
