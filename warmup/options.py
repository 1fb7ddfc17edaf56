"""Defines each option of the warm-up once: its name, default, parser and description.

To add an option, add a field here; the command line, the environment, the help and docs/configuration.md follow.
"""

from dataclasses import field, replace
from pathlib import Path
from typing import Literal, get_args

from snapcap.models.dataclass import dataclass
from snapcap.warmup.cache_folder import user_cache
from snapcap.warmup.option import (
    option,
    parse_address,
    parse_buckets,
    parse_device,
    parse_int,
    parse_moment,
    parse_path,
    parse_paths,
    parse_seconds,
    parse_step_buckets,
    parse_switch,
)

BackendChoice = Literal["auto", "aot", "jit", "eager"]
BuildChoice = Literal["auto", "local", "off"]
Kind = Literal["aot", "jit"]  # artifact kinds

BUILD_TIMEOUT = 1800.0  # seconds


def is_remote(address: str) -> bool:
    """Returns whether a store is remote. A child process fetches from a remote store into a local folder."""
    return "://" in address


@dataclass(frozen=True)
class ModelOptions:
    """Options that choose the model and limit the length of its captions."""

    source: str = option(
        "demo",
        "demo, a folder, a hub id, or s3://bucket/prefix; `snapcap serve` takes several as NAME=MODEL, with the "
        "option repeated",
        name="model",
        metavar="MODEL",
        repeatable=True,
    )
    cache_dir: Path = option(
        user_cache,
        "folder for downloaded checkpoints and artifacts",
        parse=parse_path,
        metavar="FOLDER",
        default_text="~/.cache/snapcap",
    )
    prepared_weights: bool = option(
        True,
        "keep weights in the artifact folder in the device's layout, so that later starts convert nothing",
        parse=parse_switch,
    )
    task: str = option("", "task of requests that name none", metavar="TASK", default_text="the first")
    max_new_tokens: int = option(
        0,
        "most tokens of a caption if the request does not say, which the KV cache then holds; 0: the model's "
        "number",
        parse=parse_int(0, 65536),
    )
    text_tokens: int = option(
        0,
        "most tokens of text that are read together with the image: of a task and its text, or of an instruction "
        "and the texts before the image; more take longer; 0: the model's number",
        parse=parse_int(0, 65536),
    )
    cache_length: int = option(
        0,
        "most tokens of a prompt and its caption together, which the KV cache holds; 0: the model's number",
        parse=parse_int(0, 65536),
    )


@dataclass(frozen=True)
class ComputeOptions:
    """Where and how the model runs."""

    device: str = option("auto", "auto (cuda, else cpu), cpu, cuda or cuda:N", parse=parse_device, metavar="DEVICE")
    dtype: str = option(
        "auto",
        "precision of weights and activations; auto: bfloat16 on cuda; on cpu float32, or bfloat16 if the "
        "checkpoint is stored in it and the processor multiplies it (AVX512-BF16, AMX); int8: weights of linear "
        "layers in int8, keys and values of images in bfloat16 unless heads share them, the rest in float32, "
        "on cpu",
        choices=("auto", "float32", "bfloat16", "float16", "int8"),
    )
    backend: BackendChoice = option(
        "auto",
        "how the model runs; auto: compiled ahead (aot) if there are artifacts, else uncompiled (eager) until they "
        "are built",
        choices=get_args(BackendChoice),
    )
    encoder_mode: str = option(
        "default",
        "how the encoder is compiled; on CUDA max-autotune may call cuDNN's attention, which costs a start 0.6 s",
        choices=("default", "max-autotune"),
    )
    decoder_mode: str = option("default", "how the decoder is compiled", choices=("default", "max-autotune"))
    buckets: tuple[int, ...] = option(
        (),
        "batch sizes to make ready; auto: 1,4,16,64 on cuda, 1,4,8 on cpu",
        parse=parse_buckets,
        metavar="N,N,…",
        default_text="auto",
    )
    step_buckets: tuple[int, ...] | None = option(
        None,
        "further batch sizes, of decode steps alone, made ready after READY; auto: on cuda without jit, with "
        "--buckets auto, those of 24,32,48,96,128,256 whose buffers take at most an eighth of the GPU's memory; "
        "else none",
        parse=parse_step_buckets,
        metavar="N,N,…",
        default_text="auto",
    )
    threads: int = option(
        0,
        "CPU threads of one operation (intra-op); 0: one for each CPU, or with a small encoder one less, except "
        "that a lone request on the CPU library has all CPUs",
        parse=parse_int(0, 1024),
    )
    strict: bool = option(
        False, "exit when the warm-up of the chosen backend fails, instead of serving eager", parse=parse_switch
    )


@dataclass(frozen=True)
class ImageOptions:
    """The limits of images that a checkpoint's transform keeps."""

    max_pixels: int = option(50_000_000, "largest image that is decoded, in pixels", parse=parse_int(1))
    max_image_tokens: int = option(
        256,
        "most tokens of an image, 200 to 1024, for models that take images of any shape; a token is 32 × 32 pixels",
        parse=parse_int(200, 1024),
    )


@dataclass(frozen=True)
class S3Options:
    """Access to s3:// sources. Credentials come from the usual AWS places."""

    endpoint_url: str | None = option(
        None, "endpoint of an S3-compatible server", name="s3_endpoint_url", metavar="URL", default_text="AWS"
    )
    region: str | None = option(
        None, "region of the bucket", name="s3_region", metavar="REGION", default_text="the AWS configuration's"
    )
    profile: str | None = option(None, "profile of the AWS configuration", name="s3_profile", metavar="NAME")
    connect_timeout: float = option(
        2.0, "time limit of a connection", name="s3_connect_timeout", parse=parse_seconds(above=True)
    )
    read_timeout: float = option(
        10.0, "time limit of one read", name="s3_read_timeout", parse=parse_seconds(above=True)
    )
    deadline: float = option(
        120.0,
        "time limit of a whole download, retries included",
        name="s3_deadline",
        parse=parse_seconds(above=True),
    )


@dataclass(frozen=True)
class StoreOptions:
    """Compiled artifacts: where they are, whose are accepted, and what happens when there are none."""

    address: str = option(
        "",
        "artifact store: a folder, or s3://bucket/prefix",
        name="store",
        parse=parse_address,
        metavar="STORE",
        default_text="store in the cache folder",
    )
    trusted_keys: tuple[Path, ...] = option(
        (),
        "public keys, separated by commas; artifacts are loaded only if one of these keys signed them, or if they "
        "were built here",
        name="trusted_key",
        parse=parse_paths,
        metavar="FILE,…",
    )
    allow_unsigned: bool = option(
        False,
        "accept artifacts from S3 that nobody signed: whoever can write there can run code here",
        parse=parse_switch,
    )
    min_built: str = option(
        "",
        "refuse artifacts that were built before this moment, such as 2026-11-25 or 2026-11-25T14:30Z (UTC), also "
        "signed ones: an older set may have been put back",
        parse=parse_moment,
        metavar="TIME",
    )
    sign_key: Path | None = option(
        None, "private key that artifacts are signed with when they are published", parse=parse_path
    )
    deadline: float = option(
        30.0,
        "time limit of fetching artifacts at the start; past it the server starts eager",
        name="store_deadline",
        parse=parse_seconds(above=True),
    )
    build: BuildChoice = option(
        "auto",
        "without artifacts, build them in the background; local: also if they cannot be published",
        choices=get_args(BuildChoice),
    )
    build_workers: int = option(
        0,
        "compilers that run at once; 0: one for each CPU, and one less in the background",
        parse=parse_int(0, 256),
    )
    build_timeout: float = option(
        BUILD_TIMEOUT,
        "time limit of compiling, checking or publishing a package; a build that makes no package in twice that "
        "time is given up",
        parse=parse_seconds(above=True),
    )
    remote_cache: str = option(
        "",
        "redis://host:port that shares torch's own compile caches, for builds and jit: whoever can write there "
        "can run code here",
        metavar="URL",
    )
    weights: bool = option(
        False,
        "let `snapcap build` publish prepared weights too, for a model in S3 or on the hub",
        parse=parse_switch,
    )

    @property
    def remote(self) -> str | None:
        """The S3 address of the store; None for a folder."""
        return self.address if is_remote(self.address) else None

    @property
    def publishes_to_remote(self) -> bool:
        """True if artifacts built here are published to S3. A signing key is needed: by default servers refuse
        unsigned artifacts."""
        return self.remote is not None and self.sign_key is not None

    @property
    def accepted_keys(self) -> tuple[Path, ...]:
        """The public keys whose signatures are accepted. A server that signs and has no trusted keys accepts its
        own public key, which `snapcap keygen` writes beside the private key."""
        if self.trusted_keys or self.sign_key is None:
            return self.trusted_keys
        public = Path(f"{self.sign_key}.pub")
        return (public,) if public.is_file() else ()


@dataclass(frozen=True)
class StartOptions:
    """Options that choose the model and how to run it. The values 0, () and "auto" mean: decide from the model and
    the machine."""

    model: ModelOptions = field(default_factory=ModelOptions)
    compute: ComputeOptions = field(default_factory=ComputeOptions)
    images: ImageOptions = field(default_factory=ImageOptions)
    store: StoreOptions = field(default_factory=StoreOptions)
    s3: S3Options = field(default_factory=S3Options)
    # Identifies the packages and weights of the model's last start in this server (`StatusState.tested`). No user
    # sets it.
    tested: str = ""

    @property
    def kind(self) -> Kind:
        """The kind of artifacts that a start with these options looks up."""
        return "jit" if self.compute.backend == "jit" else "aot"

    @property
    def store_folder(self) -> Path:
        """The folder from which artifacts are loaded: the store itself, or the cache of an S3 store."""
        if self.store.address and self.store.remote is None:
            return Path(self.store.address)
        return self.model.cache_dir / "store"


@dataclass(frozen=True)
class FetchJob:
    """Holds the options of a process that fetches or publishes artifacts. ``store`` names the signing key only if
    the process signs."""

    store: StoreOptions
    s3: S3Options
    folder: Path
    source: str

    @classmethod
    def of(cls, options: StartOptions, *, signs: bool = False) -> "FetchJob":
        """Returns the options of a process beside a start. ``signs``: the process publishes."""
        store = replace(
            options.store,
            trusted_keys=options.store.accepted_keys,
            sign_key=options.store.sign_key if signs else None,
            remote_cache="",  # the address may hold a password, and only compilers need it
        )
        return cls(store, options.s3, options.store_folder.absolute(), options.model.source)
