"""Defines the whole configuration as frozen dataclasses, which `config/reader.py` alone fills and validates.

To add an option, add a field here, or in `warmup/options.py` if the warm-up uses it. The command line, the
environment and the help follow. `python -m snapcap.service.cli.tables docs/configuration.md` writes it into the
page.
"""

from dataclasses import field

from snapcap.models.dataclass import dataclass
from snapcap.service.config.http_settings import HttpLimits, HttpSettings
from snapcap.service.config.image_settings import ImageProcessSettings, ImageSettings
from snapcap.warmup.option import option, parse_int, parse_seconds
from snapcap.warmup.options import ComputeOptions, ModelOptions, S3Options, StartOptions, StoreOptions


@dataclass(frozen=True)
class QueueSettings:
    """Admission of requests to the queue."""

    size: int = option(
        "queue_size",
        256,
        "images that may be in the queue, from their arrival until the device has them; beyond it a "
        "request gets 429",
        parse=parse_int(1, 1_000_000),
        metavar="N",
    )
    timeout: float = option(
        "request_timeout",
        30.0,
        "time limit of a caption; then the request gets 504",
        parse=parse_seconds(above=True),
        metavar="SECONDS",
    )


@dataclass(frozen=True)
class WatchdogSettings:
    """Time limits after which a server that hangs logs the reason and ends, so that it is started again."""

    timeout: float = option(
        "watchdog_timeout",
        30.0,
        "how long the engine or the event loop may make no progress before the server ends; 0: no limit",
        parse=parse_seconds(),
        metavar="SECONDS",
    )
    start_timeout: float = option(
        "start_timeout",
        0.0,
        "how long a start may take before the server ends; 0: no limit",
        parse=parse_seconds(),
        metavar="SECONDS",
    )


@dataclass(frozen=True)
class LogSettings:
    """Log lines on standard error."""

    format: str = option(
        "log_format",
        "text",
        "format of the log, which has a line for each phase of the start and each request",
        choices=("text", "json"),
    )
    level: str = option(
        "log_level", "info", "least severe level that is written", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True)
class Settings(StartOptions):
    """Holds all settings: the options of the warm-up, and the groups of the service."""

    images: ImageSettings = field(default_factory=ImageSettings)
    image_processes: ImageProcessSettings = field(default_factory=ImageProcessSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    watchdog: WatchdogSettings = field(default_factory=WatchdogSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    limits: HttpLimits = field(default_factory=HttpLimits)
    log: LogSettings = field(default_factory=LogSettings)


# The groups in the order of the help.
GROUPS: dict[str, type] = {
    "model": ModelOptions,
    "compute": ComputeOptions,
    "images": ImageSettings,
    "image_processes": ImageProcessSettings,
    "queue": QueueSettings,
    "watchdog": WatchdogSettings,
    "http": HttpSettings,
    "limits": HttpLimits,
    "store": StoreOptions,
    "s3": S3Options,
    "log": LogSettings,
}
