"""Defines the whole configuration as frozen dataclasses, which `config/reader.py` alone fills and validates.

To add an option, add a field here; the command line, the environment, the help and the README table follow.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from snapcap.service.config.http_settings import HttpLimits, HttpSettings
from snapcap.service.config.image_settings import DecodingSettings, ImageSettings
from snapcap.service.config.option import (
    option,
    parse_buckets,
    parse_device,
    parse_int,
    parse_seconds,
    parse_switch,
)
from snapcap.service.config.store_settings import S3Settings, StoreSettings
from snapcap.service.config.watchdog_settings import WatchdogSettings


def default_cache_dir() -> Path:
    """The user cache folder, as the XDG base directory specification has it."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "snapcap"


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and the limits of its captions."""

    source: str = option(
        "model",
        "demo",
        "demo, a folder, a hub id, or s3://bucket/prefix",
        metavar="MODEL",
    )
    cache_dir: Path = option(  # noqa: RUF009 - a field with a default factory
        "cache_dir",
        default_cache_dir,
        "folder for downloaded checkpoints and artifacts",
        parse=lambda text: Path(text).expanduser(),
        metavar="FOLDER",
        default_text="~/.cache/snapcap",
    )
    max_new_tokens: int = option(
        "max_new_tokens",
        0,
        "tokens of a caption at most, when the request does not say; 0: what the model says",
        parse=parse_int(0, 65536),
        metavar="N",
    )
    cache_length: int = option(
        "cache_length",
        0,
        "tokens of prompt and caption together that the KV cache holds for each row; 0: what the model says",
        parse=parse_int(0, 65536),
        metavar="N",
    )


@dataclass(frozen=True)
class ComputeSettings:
    """Where and how the model runs."""

    device: str = option(
        "device",
        "auto",
        "auto (cuda, else cpu), cpu, cuda or cuda:N",
        parse=parse_device,
        metavar="DEVICE",
    )
    dtype: str = option(
        "dtype",
        "auto",
        "precision of weights and activations; auto: bfloat16 on cuda, float32 on cpu",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    backend: str = option(
        "backend",
        "auto",
        "how the regions of the model run; auto: aot where there are artifacts, else eager until they are built",
        choices=("auto", "aot", "jit", "eager"),
    )
    encoder_mode: str = option(
        "encoder_mode", "default", "how the encoder is compiled", choices=("default", "max-autotune")
    )
    decoder_mode: str = option(
        "decoder_mode", "default", "how the decoder is compiled", choices=("default", "max-autotune")
    )
    ready_when: str = option(
        "ready_when",
        "all",
        "ready when all buckets are warm, or the first; the others follow while it serves",
        choices=("all", "first"),
    )
    buckets: tuple[int, ...] = option(
        "buckets",
        (),
        "batch sizes to make ready; auto: 1,4,16,64 on cuda, 1,4,8 on cpu",
        parse=parse_buckets,
        metavar="N,N,…",
        default_text="auto",
    )
    threads: int = option(
        "threads",
        0,
        "CPU threads of one operation (intra-op); 0: one for each CPU but one",
        parse=parse_int(0, 1024),
        metavar="N",
    )
    strict: bool = option(
        "strict",
        False,
        "exit when the warm-up of the chosen backend fails, instead of serving eager",
        parse=parse_switch,
        default_text="off",
    )


@dataclass(frozen=True)
class QueueSettings:
    """Admission of requests."""

    size: int = option(
        "queue_size",
        256,
        "images that may wait, from when they are here until the device has them; one more gets 429",
        parse=parse_int(1, 1_000_000),
        metavar="N",
    )
    timeout: float = option(
        "request_timeout",
        30.0,
        "time limit of a caption; past it the request gets 504",
        parse=parse_seconds(above=True),
        metavar="SECONDS",
    )


@dataclass(frozen=True)
class LogSettings:
    """Log lines on standard error."""

    format: str = option(
        "log_format", "text", "one line a phase and a request, as text or JSON", choices=("text", "json")
    )
    level: str = option(
        "log_level", "info", "least severe level that is written", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True)
class Settings:
    """Everything, in the groups in which the help shows it."""

    model: ModelSettings = field(default_factory=ModelSettings)
    compute: ComputeSettings = field(default_factory=ComputeSettings)
    images: ImageSettings = field(default_factory=ImageSettings)
    decoding: DecodingSettings = field(default_factory=DecodingSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    watchdog: WatchdogSettings = field(default_factory=WatchdogSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    limits: HttpLimits = field(default_factory=HttpLimits)
    store: StoreSettings = field(default_factory=StoreSettings)
    s3: S3Settings = field(default_factory=S3Settings)
    log: LogSettings = field(default_factory=LogSettings)


GROUPS: dict[str, type] = {
    "model": ModelSettings,
    "compute": ComputeSettings,
    "images": ImageSettings,
    "decoding": DecodingSettings,
    "queue": QueueSettings,
    "watchdog": WatchdogSettings,
    "http": HttpSettings,
    "limits": HttpLimits,
    "store": StoreSettings,
    "s3": S3Settings,
    "log": LogSettings,
}
