"""Defines the options of a start and of its artifact store: the warm-up's own configuration."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

BackendChoice = Literal["auto", "aot", "jit", "eager"]
BuildChoice = Literal["auto", "local", "off"]
ReadyWhen = Literal["all", "first"]
Kind = Literal["aot", "jit"]  # of artifacts
T = TypeVar("T")

BUILD_TIMEOUT = 1800.0


def is_remote(address: str) -> bool:
    """Whether a store is not a folder: then it is fetched from in a child process, into a local folder."""
    return "://" in address


@dataclass(frozen=True)
class S3Options:
    """Where S3 is and how long to wait for it; what is None comes from the AWS environment and files.

    connect_timeout, read_timeout: seconds of one attempt; there are at most three.
    deadline: seconds that a listing with all its downloads may take.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    connect_timeout: float = 2.0
    read_timeout: float = 10.0
    deadline: float = 120.0


@dataclass(frozen=True)
class StoreOptions:
    """Where artifacts are, whose are accepted, and who may add to them.

    ``address``: a folder or s3://bucket/prefix; "" is the folder ``local``, which is also the cache in front of S3.
    ``deadline``: seconds a fetch may take in all. ``sign_key``: private key to sign what is published with.
    """

    local: Path
    address: str = ""
    trusted_keys: tuple[Path, ...] = ()
    allow_unsigned: bool = False
    sign_key: Path | None = None
    deadline: float = 30.0

    @property
    def remote(self) -> str | None:
        """The S3 address, when the store is not a folder."""
        return self.address if is_remote(self.address) else None

    @property
    def folder(self) -> Path:
        """The folder that artifacts are loaded from."""
        return Path(self.address).expanduser() if self.address and not self.remote else self.local

    @property
    def publishes_to_remote(self) -> bool:
        """Whether what is made here goes to S3: only signed, as nobody would accept it otherwise."""
        return self.remote is not None and self.sign_key is not None


@dataclass(frozen=True)
class StartOptions:
    """Model source and how to run it. 0, () and "auto" mean: decide from the model and the machine.

    ``build_timeout``: seconds in which a child of a build must have answered.
    """

    model: str
    cache_dir: Path
    store: StoreOptions
    device: str = "auto"
    dtype: str = "auto"
    backend: BackendChoice = "auto"
    encoder_mode: str = "default"
    decoder_mode: str = "default"
    buckets: tuple[int, ...] = ()
    cache_length: int = 0
    max_new_tokens: int = 0
    threads: int = 0
    max_pixels: int = 50_000_000
    ready_when: ReadyWhen = "all"
    strict: bool = False
    build: BuildChoice = "auto"
    build_workers: int = 0
    build_timeout: float = BUILD_TIMEOUT
    remote_cache: str = ""
    s3: S3Options = field(default_factory=S3Options)

    @property
    def kind(self) -> Kind:
        """The kind of artifacts that a start with these options looks for, where it looks for any."""
        return "jit" if self.backend == "jit" else "aot"

    def before_ready(self, buckets: tuple[T, ...]) -> tuple[T, ...]:
        """Those of an artifact set's buckets, given in ascending order, that READY waits for."""
        return buckets[:1] if self.ready_when == "first" else buckets
