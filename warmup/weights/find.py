"""Names the prepared weights of a checkpoint, and finds them, mostly without reading the checkpoint. No torch.

Nothing in the names is part of the artifact key: checkpoints of the same shapes share one set of packages.

Reading a checkpoint takes seconds. So its digest is computed once and recorded with the files' identity, which is
their names, sizes, inodes and times. A change of a file changes its identity.
"""

import contextlib
import errno
import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from snapcap.models.config import IMAGE_TOKENS, ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.json_object import from_json, to_json
from snapcap.models.weights.listing import weight_names
from snapcap.models.weights.prepared import MappedWeights, PreparedError, map_weights
from snapcap.warmup.artifacts.fetch import Result
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.key import FORMAT, Factors, canonical_json, source_digest
from snapcap.warmup.artifacts.manifest import is_digest
from snapcap.warmup.artifacts.store import WEIGHTS, DamagedError, StoreError, record_name
from snapcap.warmup.checkpoints.source import published_name
from snapcap.warmup.machine.installation import package_folder, torch_version
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan, device_and_dtype

if TYPE_CHECKING:
    from snapcap.models.processing.transform import ImageTransform


# Sources that decide the layout of prepared weights and the names of tensors in a checkpoint.
_SOURCES = ("weights/*.py", "layers/*.py", "families/**/*.py", "names.py", "text.py", "dimensions.py", "config.py")


def prepared_name(digest: str, checkpoint: Checkpoint, plan: Plan) -> str:
    """Returns ``<checkpoint>.<device>.<dtype>.<layout>.safetensors``. ``digest``: of ``content_digest``."""
    layout = layout_digest(checkpoint.config, checkpoint.transform)
    return f"{digest}.{plan.device_type}.{plan.dtype}.{layout}.safetensors"


def model_factors(options: StartOptions) -> Factors:
    """Returns the factors of the manifest of a model's published weights. All factors are known without the model's
    files. Raises the errors of ``layout_digest`` and ``device_and_dtype``."""
    device, dtype = device_and_dtype(options.compute)
    # Lengths beside the model's own are dimensions, which decide the name of the weights.
    text, image = options.model.text_tokens, options.images.max_image_tokens
    lengths = {"model.text_tokens": text or None, "model.image_tokens": None if image == IMAGE_TOKENS else image}
    return {
        **{name: length for name, length in lengths.items() if length is not None},
        "kind": "model",
        "format": FORMAT,
        "model.source": published_name(options.model.source),
        "device.type": device.partition(":")[0],
        "model.dtype": dtype,
        "source.weights": _source_digest(),
        "torch.version": torch_version().version,
    }


def layout_digest(config: ModelConfig, transform: "ImageTransform") -> str:
    """Returns the SHA-256, in hex, of everything that decides how a checkpoint's tensors become the regions'
    weights: snapcap's sources, torch's version, and the configuration's dimensions, tokens before an image and
    normalisation of images. Raises OSError if the sources cannot be read, MachineError if torch's version is
    unknown."""
    described = {
        "sources": _source_digest(),
        "torch": torch_version().version,
        "dimensions": config.dimensions(),
        "prefix": config.prefix,
        "normalisation": transform.normalisation,
    }
    return hashlib.sha256(canonical_json(described)).hexdigest()


def _source_digest() -> str:
    models, files = package_folder("snapcap.models"), list[Path]()
    for pattern in _SOURCES:
        found = [*models.glob(pattern)]
        if not found:
            raise FileNotFoundError(errno.ENOENT, "an installation without its sources", str(models / pattern))
        files += found
    return source_digest(models, files)


# The resolution of files' times is up to two seconds on some file systems: two writes may get the same time.
CLOCK_NS = 2_000_000_000


@dataclass(frozen=True)
class FileIdentity:
    """Identifies a file without its content. ``name``: in the checkpoint's folder. ``path``: the target of a link.
    Times in nanoseconds. The device number is left out, because it may change with each mount."""

    name: str
    path: str
    size: int
    modified: int
    changed: int
    inode: int


Identity = tuple[FileIdentity, ...]


def identify(folder: Path) -> Identity:
    """Returns the identities of a checkpoint's files of weights, and of their index. Raises WeightsError if the
    folder has no weights, and OSError if the status of a file cannot be read."""
    files = []
    for name in weight_names(folder):
        real = (folder / name).resolve()
        status = real.stat()
        times = status.st_mtime_ns, status.st_ctime_ns
        files.append(FileIdentity(name, str(real), status.st_size, *times, status.st_ino))
    return tuple(files)


def is_at_rest(files: Identity, moment: int) -> bool:
    """Returns whether every change of the files after ``moment`` (nanoseconds since the epoch) changes their
    identity: their times are old enough that a later change gets another time. Only the system sets the time of
    change. A time in the future comes from a wrong clock, or from an archive of another time zone."""
    return all(abs(moment - each) >= CLOCK_NS for file in files for each in (file.changed, file.modified))


def content_digest(folder: Path) -> str:
    """Returns the SHA-256, in hex, of the names and contents of the files of weights and of their index. Raises
    WeightsError or OSError if they cannot be read."""
    digest = hashlib.sha256()
    for name in weight_names(folder):
        with (folder / name).open("rb") as file:
            digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


_MOST_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Record:
    """Records the content ``digest`` of ``files``. ``began``: nanoseconds since the epoch before they were read."""

    files: Identity
    digest: str
    began: int


def recorded_digest(store: FolderStore, folder: Path, files: Identity) -> str | None:
    """Returns the recorded digest of a checkpoint if its files are unchanged; else None. Raises StoreError if the
    record cannot be read, or other users may write to it."""
    try:
        stored = store.read(record_name(WEIGHTS, folder), _MOST_BYTES)
        record = None if stored is None else from_json(Record, stored.data)
    except (DamagedError, ValueError):
        return None
    known = record is not None and record.files == files and is_at_rest(files, record.began)
    return record.digest if record is not None and known and is_digest(record.digest) else None


def write_record(store: FolderStore, folder: Path, record: Record) -> None:
    """Write the record of a checkpoint folder. Raises StoreError if it cannot be written."""
    store.write(record_name(WEIGHTS, folder), to_json(record).encode())


WeightsResult = Result | Literal["off"]


@dataclass(frozen=True)
class FoundWeights:
    """Holds the result of the lookup of prepared weights.

    result: "untrusted" and "error" come only from a store.
    mapped: the weights, on a hit.
    bytes_fetched: bytes downloaded from a store."""

    result: WeightsResult
    reason: str
    mapped: MappedWeights | None = None
    bytes_fetched: int = 0


def find_weights(checkpoint: Checkpoint, plan: Plan, store_folder: Path) -> FoundWeights:
    """Map the prepared weights of a checkpoint for a device and dtype, or return the reason why none can be used.
    Raises nothing, because a start can always read the checkpoint."""
    try:
        if not store_folder.is_dir():
            return FoundWeights("miss", "there is no artifact folder")
        store = FolderStore.open(store_folder)
        digest = recorded_digest(store, checkpoint.folder, identify(checkpoint.folder))
        if digest is None:
            mapped = _of_content(store, checkpoint, plan)
        else:
            mapped = open_prepared(store, digest, checkpoint, plan)
    except (PreparedError, StoreError) as error:
        return FoundWeights("corrupt", str(error))
    except Exception as error:  # loading reports the errors of a checkpoint
        return FoundWeights("miss", f"{type(error).__name__}: {error}")
    if mapped is None:
        return FoundWeights("miss", "they are not prepared for these files, this device and dtype")
    return FoundWeights("hit", f"found in {store.location}", mapped)


def _of_content(store: FolderStore, checkpoint: Checkpoint, plan: Plan) -> MappedWeights | None:
    """Map the prepared weights of a checkpoint without a record, such as another copy or container image, by the
    digest of its files. The files are read only if the store has prepared weights that may match: reading takes
    less time than importing torch and converting. The digest is recorded for the next start even without a match.
    Returns None if there are no such weights, or if the files change meanwhile. Raises the errors that
    ``find_weights`` catches."""
    if not any((store.root / WEIGHTS).glob(prepared_name("*", checkpoint, plan))):
        return None
    folder = checkpoint.folder
    files, began = identify(folder), time.time_ns()
    record = Record(files, content_digest(folder), began)
    mapped = open_prepared(store, record.digest, checkpoint, plan)
    if identify(folder) != files:
        return None
    # Without a match an existing record stays: the next preparation removes the weights that it names.
    if is_at_rest(files, began) and (mapped is not None or not store.path(record_name(WEIGHTS, folder)).exists()):
        with contextlib.suppress(StoreError):  # the folder may be read-only
            write_record(store, folder, record)
    return mapped


def open_prepared(store: FolderStore, digest: str, checkpoint: Checkpoint, plan: Plan) -> MappedWeights | None:
    """Map the prepared weights of the checkpoint with this content digest; returns None without such a file. Raises
    PreparedError if the file is damaged, and StoreError if the file cannot be read, or other users may write to
    it."""
    name = prepared_name(digest, checkpoint, plan)
    with store.opened(f"{WEIGHTS}/{name}") as file:
        return None if file is None else map_used(file, name)


def map_used(file: BinaryIO, name: str) -> MappedWeights:
    """Maps an open file of prepared weights, and sets its time of last use. Raises as ``map_weights`` does."""
    mapped = map_weights(file, name)
    with contextlib.suppress(OSError):  # the folder may be read-only
        os.utime(file.fileno())
    return mapped
