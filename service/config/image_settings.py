"""Defines the options of decoding images."""

from snapcap.models.dataclass import dataclass
from snapcap.warmup.option import option, parse_auto, parse_int, parse_seconds, parse_size
from snapcap.warmup.options import ImageOptions


@dataclass(frozen=True)
class ImageSettings(ImageOptions):
    """Decoding of images."""

    decode_threads: int = option(
        "decode_threads",
        0,
        "threads that parse request bodies, and that decode images in `snapcap caption` and on Ray; 0: one for "
        "each CPU, at most 8",
        parse=parse_int(0, 1024),
        metavar="N",
    )
    decode_memory: int | None = option(
        "decode_memory",
        None,
        "memory that all images together may take while they are decoded, such as 1GiB; an image that takes more "
        "than half of it is refused; auto: a quarter of the container's limit, at most 4 GiB",
        parse=parse_auto(parse_size),
        metavar="SIZE",
        default_text="auto",
    )
    decode_timeout: float = option(
        "decode_timeout",
        10.0,
        "CPU seconds that decoding an image may take; then the image is refused",
        parse=parse_seconds(above=True),
        metavar="SECONDS",
        default_text="10",
    )


@dataclass(frozen=True)
class ImageProcessSettings:
    """Decoding of images by a server's own processes."""

    count: int | None = option(
        "decode_processes",
        None,
        "processes that decode images; auto: one for each CPU up to 4 CPUs, beyond that five for every eight CPUs, "
        "at least 4 and at most 12",
        parse=parse_auto(parse_int(1, 1024)),
        metavar="N",
        default_text="auto",
    )
