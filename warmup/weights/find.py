"""Finds the prepared weights of a checkpoint, mostly without reading the checkpoint. No torch."""

import contextlib
import os
import time
from pathlib import Path
from typing import Literal

from snapcap.models.dataclass import dataclass
from snapcap.models.weights.prepared import MappedWeights, PreparedError, map_weights
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.store import WEIGHTS, StoreError
from snapcap.warmup.weights.identity import content_digest, flushed_identity, identify, is_at_rest
from snapcap.warmup.weights.key import layout_digest, prepared_name
from snapcap.warmup.weights.records import Record, record_name, recorded_digest, write_record

WeightsResult = Literal["hit", "miss", "corrupt", "untrusted", "error", "off"]


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
    return FoundWeights("hit", mapped.header.key, mapped)


def _of_content(store: FolderStore, checkpoint: Checkpoint, plan: Plan) -> MappedWeights | None:
    """Map the prepared weights of a checkpoint without a record, such as another copy or container image, by the
    digest of its files. The files are read only if the store has weights that may be theirs: reading takes less
    time than importing torch and converting. The digest is recorded for the next start even without a match.
    Returns None if there are no such weights, or if the files change meanwhile.

    Raises the errors that ``find_weights`` catches.
    """
    name = prepared_name("*", plan.device_type, plan.dtype, layout_digest(checkpoint.config, checkpoint.transform))
    if not any((store.root / WEIGHTS).glob(name)):
        return None
    folder = checkpoint.folder
    files, began = flushed_identity(folder), time.time_ns()
    record = Record(files, content_digest(folder), began)
    mapped = open_prepared(store, record.digest, checkpoint, plan)
    if identify(folder) != files:
        return None
    # A record of what was here before names weights that the next preparation removes.
    if is_at_rest(files, began) and (mapped is not None or not store.path(record_name(folder)).exists()):
        with contextlib.suppress(StoreError):  # the folder may be read-only
            write_record(store, folder, record)
    return mapped


def open_prepared(store: FolderStore, digest: str, checkpoint: Checkpoint, plan: Plan) -> MappedWeights | None:
    """Map the weights that were prepared of a checkpoint, whose content has this digest; None where there are none.

    Raises:
        PreparedError: the file is damaged.
        StoreError: it cannot be read, or others may write to it.
    """
    layout = layout_digest(checkpoint.config, checkpoint.transform)
    name = prepared_name(digest, plan.device_type, plan.dtype, layout)
    with store.opened(f"{WEIGHTS}/{name}") as file:
        if file is None:
            return None
        mapped = map_weights(file, name)
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.utime(file.fileno())  # the newest are kept
        return mapped
