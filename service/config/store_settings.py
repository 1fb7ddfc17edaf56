"""Defines the options of artifact stores and of S3."""

from dataclasses import dataclass
from pathlib import Path

from snapcap.service.config.option import option, parse_int, parse_paths, parse_seconds, parse_switch


@dataclass(frozen=True)
class S3Settings:
    """Access to s3:// sources. Credentials come from the usual AWS places."""

    endpoint_url: str | None = option(
        "s3_endpoint_url", None, "endpoint of an S3-compatible server", metavar="URL", default_text="AWS"
    )
    region: str | None = option(
        "s3_region", None, "region", metavar="REGION", default_text="the AWS configuration's"
    )
    profile: str | None = option(
        "s3_profile", None, "profile of the AWS configuration", metavar="NAME", default_text="none"
    )
    connect_timeout: float = option(
        "s3_connect_timeout",
        2.0,
        "time limit of a connection",
        parse=parse_seconds(above=True),
        metavar="SECONDS",
    )
    read_timeout: float = option(
        "s3_read_timeout",
        10.0,
        "time limit of one read",
        parse=parse_seconds(above=True),
        metavar="SECONDS",
    )
    deadline: float = option(
        "s3_deadline",
        120.0,
        "time limit of a whole download, retries included",
        parse=parse_seconds(above=True),
        metavar="SECONDS",
    )


@dataclass(frozen=True)
class StoreSettings:
    """Compiled artifacts: where they are, whose are accepted, and what happens when there are none."""

    address: str = option(
        "store",
        "",
        "artifact store: a folder, or s3://bucket/prefix",
        metavar="STORE",
        default_text="store in the cache folder",
    )
    trusted_keys: tuple[Path, ...] = option(
        "trusted_key",
        (),
        "public keys, separated by commas: no artifacts are loaded but what one of them signed or was built here",
        parse=parse_paths,
        metavar="FILE,…",
        default_text="none",
    )
    allow_unsigned: bool = option(
        "allow_unsigned",
        False,
        "accept artifacts from S3 that nobody signed: whoever can write there can run code here",
        parse=parse_switch,
        default_text="off",
    )
    sign_key: Path | None = option(  # noqa: RUF009 - a field, not a shared value
        "sign_key",
        None,
        "private key that artifacts are signed with when they are published",
        parse=lambda text: Path(text).expanduser(),
        metavar="FILE",
        default_text="none",
    )
    deadline: float = option(
        "store_deadline",
        30.0,
        "time limit of fetching artifacts at the start; past it the server starts eager",
        parse=parse_seconds(above=True),
        metavar="SECONDS",
    )
    build: str = option(
        "build",
        "auto",
        "without artifacts, build them in the background; local: also where they cannot be published",
        choices=("auto", "local", "off"),
    )
    build_workers: int = option(
        "build_workers",
        0,
        "compilers that run at once; 0: one for each CPU, and one less in the background",
        parse=parse_int(0, 256),
        metavar="N",
    )
    build_timeout: float = option(
        "build_timeout",
        1800.0,
        "in which a package must be compiled, checked or published, else it has failed; a build that makes none in "
        "twice that time is given up",
        parse=parse_seconds(above=True),
        metavar="SECONDS",
    )
    remote_cache: str = option(
        "remote_cache",
        "",
        "redis://host:port that shares torch's own compile caches, for builds and jit: whoever can write there "
        "can run code here",
        metavar="URL",
        default_text="none",
    )
