"""Defines the time limits after which a hanging start, engine or event loop is given up."""

from dataclasses import dataclass

from snapcap.warmup.option import option, parse_seconds


@dataclass(frozen=True)
class WatchdogSettings:
    """When a part that hangs is given up: the server says so and ends, to be started again."""

    timeout: float = option(
        "watchdog_timeout",
        30.0,
        "how long the engine or the event loop may stand still before the server ends; 0: for ever",
        parse=parse_seconds(),
        metavar="SECONDS",
    )
    start_timeout: float = option(
        "start_timeout",
        0.0,
        "how long a start may take before the server ends; 0: as long as it takes",
        parse=parse_seconds(),
        metavar="SECONDS",
    )
