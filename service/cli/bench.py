"""Runs `snapcap bench`, which measures this server beside its peers."""

import sys
from collections.abc import Sequence

from snapcap.service.config.reader import SettingsError


def bench(arguments: Sequence[str]) -> int:
    """Runs `benchmarks.command`, which has options of its own.

    Raises:
        SettingsError: the command line is wrong.
    """
    from snapcap.benchmarks.command import UsageError, main  # noqa: PLC0415  other commands do not need it

    try:
        return main(arguments)
    except UsageError as error:
        raise SettingsError(str(error)) from error
    except KeyboardInterrupt:
        print("snapcap: interrupted", file=sys.stderr)
        return 130
