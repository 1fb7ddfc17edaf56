"""Defines the whole configuration as frozen dataclasses, which `config/reader.py` alone fills and validates.

To add an option, add a field here, or in `warmup/options.py` if the warm-up uses it. The command line, the
environment and the help follow. `python tests/support/documents/tables.py docs/configuration.md` writes it into the
page.
"""

from dataclasses import field
from pathlib import Path

from snapcap.models.dataclass import dataclass
from snapcap.warmup.option import (
    option,
    parse_auto,
    parse_host_names,
    parse_hosts,
    parse_int,
    parse_name,
    parse_names,
    parse_origins,
    parse_path,
    parse_root_path,
    parse_seconds,
    parse_size,
)
from snapcap.warmup.options import ImageOptions, StartOptions


@dataclass(frozen=True)
class ImageSettings(ImageOptions):
    """Decoding of images."""

    decode_threads: int = option(
        0,
        "threads that parse request bodies, and that decode images in `snapcap caption`; 0: one for "
        "each CPU, at most 8",
        parse=parse_int(0, 1024),
    )
    decode_memory: int | None = option(
        None,
        "memory that all images together may take while they are decoded, such as 1GiB; an image that takes more "
        "than half of it is refused; auto: a quarter of the container's limit, at most 4 GiB",
        parse=parse_auto(parse_size),
        default_text="auto",
    )
    decode_timeout: float = option(
        10.0,
        "CPU seconds that decoding an image may take; then the image is refused",
        parse=parse_seconds(above=True),
        default_text="10",
    )


@dataclass(frozen=True)
class ImageProcessSettings:
    """Decoding of images by a server's own processes."""

    count: int | None = option(
        None,
        "processes that decode images; auto: one for each CPU up to 4 CPUs, beyond that five for every eight CPUs, "
        "at least 4 and at most 12",
        name="decode_processes",
        parse=parse_auto(parse_int(1, 1024)),
        default_text="auto",
    )


@dataclass(frozen=True)
class QueueSettings:
    """Admission of requests to the queue."""

    size: int = option(
        256,
        "images that may be in the queue, from their arrival until the device has them; beyond it a "
        "request gets 429",
        name="queue_size",
        parse=parse_int(1, 1_000_000),
    )
    timeout: float = option(
        30.0,
        "time limit of a caption; then the request gets 504",
        name="request_timeout",
        parse=parse_seconds(above=True),
    )


@dataclass(frozen=True)
class ResidencySettings:
    """Several models in one server: which there are, and how long each stays in memory."""

    models: Path | None = option(
        None,
        "TOML file with a table for each model: the table's name is the model's; the table has `model`, and those "
        "options of the groups Model and Compute that differ from the command line",
        parse=parse_path,
    )
    idle_unload: float = option(
        0.0,
        "how long a model may get no request before its processes end and its memory is free; the next request "
        "wakes it; 0: every model stays",
        parse=parse_seconds(),
    )
    preload: tuple[str, ...] = option(
        (),
        "model that must be ready before READY; repeat the option, or separate names by commas; all: every model; "
        "none: no model, the first request wakes each; auto: all, or none if models may leave",
        parse=parse_names,
        default_text="auto",
        repeatable=True,
    )
    device_memory: int | None = option(
        None,
        "memory of the device that models may allocate together, such as 20GiB; the least recently used model "
        "leaves when another model needs the memory",
        parse=parse_size,
        default_text="no limit",
    )
    host_memory: int | None = option(
        None,
        "memory that the processes of all models may take together, without files; models leave as with "
        "--device-memory",
        parse=parse_size,
        default_text="no limit",
    )


@dataclass(frozen=True)
class WatchdogSettings:
    """Time limits after which a server that hangs logs the reason and ends, so that it is started again."""

    timeout: float = option(
        30.0,
        "how long the engine or the event loop may make no progress before the server ends; 0: no limit",
        name="watchdog_timeout",
        parse=parse_seconds(),
    )
    start_timeout: float = option(
        0.0, "how long a start may take before the server ends; 0: no limit", parse=parse_seconds()
    )


@dataclass(frozen=True)
class HttpSettings:
    """The address of the server, and the clients that may use it."""

    host: str = option("0.0.0.0", "address to listen on", metavar="ADDRESS")  # noqa: S104
    port: int = option(8000, "port to listen on; 0: any free port", parse=parse_int(0, 65535), metavar="PORT")
    root_path: str = option(
        "",
        "path under which a proxy serves this server, such as /cap; the proxy may remove the path or leave it",
        parse=parse_root_path,
        metavar="PATH",
    )
    drain_delay: float = option(
        0.0, "how long requests are still served after SIGTERM, while /readyz answers 503", parse=parse_seconds()
    )
    grace_period: float = option(
        30.0, "how long running requests may take to finish after the drain delay", parse=parse_seconds()
    )
    metrics_port: int | None = option(
        None,
        "separate port for /metrics, which the main port then does not answer; 0: any free port",
        parse=parse_int(0, 65535),
        metavar="PORT",
        default_text="the main port",
    )
    api_key_file: Path | None = option(
        None,
        "file with an API key on each line; every request except probes and pages then needs a key, as "
        "`Authorization: Bearer KEY`",
        parse=parse_path,
    )
    model_name: str | None = option(
        None, "name by which clients ask for the model", parse=parse_name, default_text="that of --model"
    )
    image_hosts: tuple[str, ...] = option(
        (),
        "host from which image URLs are fetched; repeat the option, or separate hosts by commas",
        name="allow_image_host",
        parse=parse_hosts,
        metavar="HOST",
        repeatable=True,
    )
    origins: tuple[str, ...] = option(
        (),
        "origin whose pages may send requests from a browser (CORS), such as https://app.example.com; repeat the "
        "option, or separate origins by commas; *: every origin, never with cookies",
        name="allow_origin",
        parse=parse_origins,
        metavar="ORIGIN",
        repeatable=True,
    )
    hosts: tuple[str, ...] = option(
        (),
        "name by which clients may reach this server, such as captions.example.com or *.example.com; IP addresses, "
        "localhost, the machine's own name (also with .local), names without a dot, names of Kubernetes Services "
        "and names that end with .internal or .home.arpa are allowed too, any other name gets 421; repeat the "
        "option, or separate names by commas; *: any name",
        name="allowed_host",
        parse=parse_host_names,
        metavar="HOST",
        default_text="none; any name with --api-key-file",
        repeatable=True,
    )
    chat_text: str = option(
        "ignore",
        "use of a chat completion's text: ignore it, as a captioner takes no instructions, and name it in the "
        "header X-Snapcap-Ignored; or continue it, as the beginning of the caption. A model with a chat template "
        "always takes the text as its instruction",
        choices=("ignore", "continue"),
    )


@dataclass(frozen=True)
class HttpLimits:
    """The memory and the time that one client, and all clients together, may take of the HTTP server."""

    max_body_bytes: int = option(
        20 << 20, "largest request body, such as 20MiB", parse=parse_size, default_text="20MiB"
    )
    max_body_memory: int | None = option(
        None,
        "memory that all bodies together may take until their images are decoded; beyond it a request gets 429; "
        "auto: a sixteenth of the memory of the container or the machine",
        parse=parse_auto(parse_size),
        default_text="auto",
    )
    body_timeout: float = option(
        10.0,
        "how long a body may stall, or lag behind 32 KiB a second; then the request gets 408",
        parse=parse_seconds(above=True),
    )
    body_total_timeout: float = option(
        120.0, "how long a body may take to arrive; then the request gets 408", parse=parse_seconds(above=True)
    )
    max_header_bytes: int = option(
        32 << 10,
        "largest head of a request, its trailers included; a larger head gets 431, or 414 if the URL is too long",
        parse=parse_size,
        default_text="32KiB",
    )
    max_headers: int = option(
        100, "largest number of header fields of a request; more fields get 431", parse=parse_int(1, 10_000)
    )
    header_timeout: float = option(
        10.0,
        "how long the head of a request may take from its first byte to its last; then the request gets 408",
        parse=parse_seconds(above=True),
    )
    keep_alive_timeout: float = option(
        75.0,  # longer than the 60 s for which common load balancers keep idle connections
        "how long a connection may be idle; then it is closed",
        parse=parse_seconds(above=True),
    )
    send_timeout: float = option(
        30.0,
        "how long a client may leave a reply unread; then its connection is closed",
        parse=parse_seconds(above=True),
    )
    max_connections: int | None = option(
        None,
        "largest number of connections; a further connection takes the place of an idle one, or gets 503 unless it "
        "is a probe; auto: one for each 4 MiB of memory, at most 4096, and no more than open files allow",
        parse=parse_auto(parse_int(1, 1_000_000)),
        default_text="auto",
    )


@dataclass(frozen=True)
class LogSettings:
    """Log lines on standard error."""

    format: str = option(
        "text",
        "format of the log, which has a line for each phase of the start and each caption request",
        name="log_format",
        choices=("text", "json"),
    )
    level: str = option(
        "info",
        "least severe level that is written",
        name="log_level",
        choices=("debug", "info", "warning", "error"),
    )


@dataclass(frozen=True)
class Settings(StartOptions):
    """Holds all settings: the options of the warm-up, and the groups of the service."""

    images: ImageSettings = field(default_factory=ImageSettings)
    image_processes: ImageProcessSettings = field(default_factory=ImageProcessSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    residency: ResidencySettings = field(default_factory=ResidencySettings)
    watchdog: WatchdogSettings = field(default_factory=WatchdogSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    limits: HttpLimits = field(default_factory=HttpLimits)
    log: LogSettings = field(default_factory=LogSettings)


# The type of each group, in the order of the help.
GROUPS: dict[str, type] = {
    name: type(getattr(Settings(), name))
    for name in (
        *("model", "compute", "images", "image_processes", "queue", "residency", "watchdog"),
        *("http", "limits", "store", "s3", "log"),
    )
}
