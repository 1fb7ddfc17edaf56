"""Names the prepared weights of a checkpoint, and finds them, mostly without reading the checkpoint. No torch.

Nothing in the names enters the artifact key: checkpoints of the same shapes share one set of packages.

Reading a checkpoint takes seconds. So its digest is taken once and recorded, and found again by what the system
says of the files: a change of content, of a name or of a time gives another identity.
"""

import contextlib
import errno
import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from snapcap.models.config import ModelConfig
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
    """``<checkpoint>.<device>.<dtype>.<layout>.safetensors``; ``digest``: ``content_digest`` of the checkpoint."""
    layout = layout_digest(checkpoint.config, checkpoint.transform)
    return f"{digest}.{plan.device_type}.{plan.dtype}.{layout}.safetensors"


def model_factors(options: StartOptions) -> Factors:
    """The factors of the manifest under which the prepared weights of these options' model are published and looked
    for; all of them are known without its files. Raises OSError, MachineError as ``layout_digest`` does, and
    StartError as ``device_and_dtype`` does."""
    device, dtype = device_and_dtype(options.compute)
    return {
        "kind": "model",
        "format": FORMAT,
        "model.source": published_name(options.model.source),
        "device.type": device.partition(":")[0],
        "model.dtype": dtype,
        "source.weights": _source_digest(),
        "torch.version": torch_version().version,
    }


def layout_digest(config: ModelConfig, transform: "ImageTransform") -> str:
    """SHA-256, in hex, of what makes a checkpoint's tensors the regions' ones: our sources, torch, whose arithmetic
    it is, and of the configuration the dimensions, the tokens before an image and the normalisation of images.
    Raises OSError if the sources cannot be read, MachineError if what is installed cannot be told."""
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


# A file may be written twice at what a clock says is one moment, of up to two seconds on some file systems.
CLOCK_NS = 2_000_000_000


@dataclass(frozen=True)
class FileIdentity:
    """``name`` in the checkpoint's folder; ``path``: the file that it leads to; times in nanoseconds. No device,
    whose number may be another after each mount."""

    name: str
    path: str
    size: int
    modified: int
    changed: int
    inode: int


Identity = tuple[FileIdentity, ...]


def identify(folder: Path) -> Identity:
    """The files of a checkpoint folder that hold its weights, and the index that names them.

    Raises:
        WeightsError: there are none.
        OSError: one cannot be looked at.
    """
    files = []
    for name in weight_names(folder):
        real = (folder / name).resolve()
        status = real.stat()
        times = status.st_mtime_ns, status.st_ctime_ns
        files.append(FileIdentity(name, str(real), status.st_size, *times, status.st_ino))
    return tuple(files)


def is_at_rest(files: Identity, moment: int) -> bool:
    """Returns whether any change of the files after ``moment`` (nanoseconds of the clock) gives them another
    identity: no time of theirs is so near that the next change could have the same. The system sets the time of
    change; nobody else can. Times in the future are of a clock that was wrong, or of an archive's time zone."""
    return all(abs(moment - each) >= CLOCK_NS for file in files for each in (file.changed, file.modified))


def content_digest(folder: Path) -> str:
    """SHA-256, in hex, of the names and contents of the weights' files, and of the index that names them. Raises
    WeightsError, OSError if they cannot be read."""
    digest = hashlib.sha256()
    for name in weight_names(folder):
        with (folder / name).open("rb") as file:
            digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


_MOST_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Record:
    """``digest`` of the content of ``files``; ``began``: when they were about to be read, in nanoseconds."""

    files: Identity
    digest: str
    began: int


def recorded_digest(store: FolderStore, folder: Path, files: Identity) -> str | None:
    """The digest of a checkpoint whose files are these, if it was recorded and they cannot have changed since.
    Raises StoreError if the record cannot be read, or others may write to it."""
    try:
        stored = store.read(record_name(WEIGHTS, folder), _MOST_BYTES)
        record = None if stored is None else from_json(Record, stored.data)
    except (DamagedError, ValueError):
        return None
    known = record is not None and record.files == files and is_at_rest(files, record.began)
    return record.digest if record is not None and known and is_digest(record.digest) else None


def write_record(store: FolderStore, folder: Path, record: Record) -> None:
    """Raises StoreError if it cannot be written."""
    store.write(record_name(WEIGHTS, folder), to_json(record).encode())


WeightsResult = Result | Literal["off"]


@dataclass(frozen=True)
class FoundWeights:
    """Holds the result of looking for prepared weights.

    result: only a store gives "untrusted" and "error".
    mapped: the weights, on a hit.
    bytes_fetched: bytes downloaded from a store.
    """

    result: WeightsResult
    reason: str
    mapped: MappedWeights | None = None
    bytes_fetched: int = 0


def find_weights(checkpoint: Checkpoint, plan: Plan, store_folder: Path) -> FoundWeights:
    """Map the prepared weights of a checkpoint for a device and dtype, or say why there are none to be used. Raises
    nothing: a start can always read the checkpoint."""
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
    digest of its files. The files are read only if the store has weights that may be theirs: reading takes less
    time than importing torch and converting. The digest is recorded for the next start even without a match.
    Returns None if there are no such weights, or if the files change meanwhile.

    Raises the errors that ``find_weights`` catches.
    """
    if not any((store.root / WEIGHTS).glob(prepared_name("*", checkpoint, plan))):
        return None
    folder = checkpoint.folder
    files, began = identify(folder), time.time_ns()
    record = Record(files, content_digest(folder), began)
    mapped = open_prepared(store, record.digest, checkpoint, plan)
    if identify(folder) != files:
        return None
    # A record of what was here before names weights that the next preparation removes.
    if is_at_rest(files, began) and (mapped is not None or not store.path(record_name(WEIGHTS, folder)).exists()):
        with contextlib.suppress(StoreError):  # the folder may be read-only
            write_record(store, folder, record)
    return mapped


def open_prepared(store: FolderStore, digest: str, checkpoint: Checkpoint, plan: Plan) -> MappedWeights | None:
    """Map the weights that were prepared of a checkpoint, whose content has this digest; None where there are none.

    Raises:
        PreparedError: the file is damaged.
        StoreError: it cannot be read, or others may write to it.
    """
    name = prepared_name(digest, checkpoint, plan)
    with store.opened(f"{WEIGHTS}/{name}") as file:
        return None if file is None else map_used(file, name)


def map_used(file: BinaryIO, name: str) -> MappedWeights:
    """Maps an open file of prepared weights, and notes that it was used now, as the newest files are kept. Raises
    as ``map_weights``."""
    mapped = map_weights(file, name)
    with contextlib.suppress(OSError):  # the folder may be read-only
        os.utime(file.fileno())
    return mapped
