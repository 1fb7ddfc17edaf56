"""What a start is told: the warm-up's own configuration, independent of where it was read from."""

from dataclasses import dataclass, field
from pathlib import Path

from warmup.s3 import S3Options


@dataclass(frozen=True)
class StartOptions:
    """Model source and how to run it. 0, "" and "auto" mean: decide from the model and the machine."""

    model: str
    cache_dir: Path
    device: str = "auto"
    dtype: str = "auto"
    backend: str = "auto"
    buckets: tuple[int, ...] = ()
    cache_length: int = 0
    max_new_tokens: int = 0
    threads: int = 0
    max_pixels: int = 50_000_000
    s3: S3Options = field(default_factory=S3Options)
