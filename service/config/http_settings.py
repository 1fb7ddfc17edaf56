"""Defines the options of the HTTP server: where it listens, and what it lets its clients do."""

from pathlib import Path

from snapcap.models.dataclass import dataclass
from snapcap.warmup.option import (
    option,
    parse_auto,
    parse_host_names,
    parse_hosts,
    parse_int,
    parse_name,
    parse_origins,
    parse_path,
    parse_root_path,
    parse_seconds,
    parse_size,
)


@dataclass(frozen=True)
class HttpSettings:
    """The listener and who may use it."""

    host: str = option("host", "0.0.0.0", "address to listen on", metavar="ADDRESS")  # noqa: S104
    port: int = option(
        "port", 8000, "port to listen on; 0: any free one", parse=parse_int(0, 65535), metavar="PORT"
    )
    root_path: str = option(
        "root_path",
        "",
        "path under which a proxy serves this server, such as /cap, whether it takes the path away or not",
        parse=parse_root_path,
        metavar="PATH",
        default_text="none",
    )
    drain_delay: float = option(
        "drain_delay",
        0.0,
        "after SIGTERM, how long to go on serving while /readyz answers 503",
        parse=parse_seconds(),
        metavar="SECONDS",
    )
    grace_period: float = option(
        "grace_period",
        30.0,
        "after the drain delay, how long running requests may take to finish",
        parse=parse_seconds(),
        metavar="SECONDS",
    )
    metrics_port: int | None = option(
        "metrics_port",
        None,
        "port that answers /metrics, which the main port then does not; 0: any free one",
        parse=parse_int(0, 65535),
        metavar="PORT",
        default_text="the main port",
    )
    api_key_file: Path | None = option(
        "api_key_file",
        None,
        "file of keys, one a line; all but probes and pages then need one as `Authorization: Bearer KEY`",
        parse=parse_path,
        metavar="FILE",
        default_text="none",
    )
    model_name: str | None = option(
        "model_name",
        None,
        "name by which clients ask for the model",
        parse=parse_name,
        metavar="NAME",
        default_text="that of --model",
    )
    image_hosts: tuple[str, ...] = option(
        "allow_image_host",
        (),
        "host whose image URLs are fetched for /v1/chat/completions; repeat it, or separate them by commas",
        parse=parse_hosts,
        metavar="HOST",
        default_text="none",
        repeatable=True,
    )
    origins: tuple[str, ...] = option(
        "allow_origin",
        (),
        "origin whose pages may ask from a browser (CORS), such as https://app.example.com; repeat it, or separate "
        "them by commas; *: every one, never with cookies",
        parse=parse_origins,
        metavar="ORIGIN",
        default_text="none",
        repeatable=True,
    )
    hosts: tuple[str, ...] = option(
        "allowed_host",
        (),
        "name by which clients reach this server, such as captions.example.com or *.example.com, besides "
        "addresses, localhost, the machine's own name, names without a dot and those of Kubernetes Services; "
        "another gets 421; repeat it, or separate them by commas; *: any name",
        parse=parse_host_names,
        metavar="HOST",
        default_text="none; any name with --api-key-file",
        repeatable=True,
    )
    chat_text: str = option(
        "chat_text",
        "ignore",
        "the text of a chat completion: ignore it, as a captioner takes no instructions, and say so in the header "
        "X-Snapcap-Ignored; or continue it, as the beginning of the caption. A model with a chat template takes it "
        "as its instruction either way",
        choices=("ignore", "continue"),
    )


@dataclass(frozen=True)
class HttpLimits:
    """What one client, and all of them together, may make the HTTP server hold, and for how long."""

    max_body_bytes: int = option(
        "max_body_bytes",
        20 << 20,
        "largest request body, such as 20MiB",
        parse=parse_size,
        metavar="SIZE",
        default_text="20MiB",
    )
    max_body_memory: int | None = option(
        "max_body_memory",
        None,
        "bytes that all bodies together may hold until their images are decoded; more gets 429; auto: a sixteenth "
        "of the memory that the container or the machine has",
        parse=parse_auto(parse_size),
        metavar="SIZE",
        default_text="auto",
    )
    body_timeout: float = option(
        "body_timeout",
        10.0,
        "how long a body may stall, or be behind 32 KiB a second; then it gets 408",
        parse=parse_seconds(above=True),
        metavar="SECONDS",
    )
    body_total_timeout: float = option(
        "body_total_timeout",
        120.0,
        "how long a body may take at most, however it arrives",
        parse=parse_seconds(above=True),
        metavar="SECONDS",
    )
    max_header_bytes: int = option(
        "max_header_bytes",
        32 << 10,
        "largest head of a request, its trailers included; more gets 431, or 414 when it is the URL",
        parse=parse_size,
        metavar="SIZE",
        default_text="32KiB",
    )
    max_headers: int = option(
        "max_headers",
        100,
        "header fields of a request at most; more gets 431",
        parse=parse_int(1, 10_000),
        metavar="N",
    )
    header_timeout: float = option(
        "header_timeout",
        10.0,
        "how long the head of a request may take from its first byte on; then it gets 408",
        parse=parse_seconds(above=True),
        metavar="SECONDS",
    )
    keep_alive_timeout: float = option(
        "keep_alive_timeout",
        75.0,  # above the 60 s for which common load balancers keep idle connections
        "how long a connection may be idle",
        parse=parse_seconds(above=True),
        metavar="SECONDS",
    )
    send_timeout: float = option(
        "send_timeout",
        30.0,
        "how long a client may leave a reply unread; then its connection is closed",
        parse=parse_seconds(above=True),
        metavar="SECONDS",
    )
    max_connections: int | None = option(
        "max_connections",
        None,
        "connections at a time; one more takes the place of one that is idle, or gets 503 unless it is a probe; "
        "auto: one for each 4 MiB of memory, at most 4096, as far as files may be open",
        parse=parse_auto(parse_int(1, 1_000_000)),
        metavar="N",
        default_text="auto",
    )
