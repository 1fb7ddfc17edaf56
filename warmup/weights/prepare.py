"""Writes the prepared weights of a checkpoint, completely or not at all, in a separate process.

Converting takes seconds of Python on a CPU, which must not delay a server. So a process of the lowest priority
reads the checkpoint again and converts it on the CPU, also for a GPU, which only the device thread uses. The
file has the tensors that `load_weights` returns. The process ends when its parent ends.

    job   {"checkpoint": …, "plan": …, "folder": …}, then {"thorough": …}

Run as ``python -m snapcap.warmup.weights.prepare``.
"""

import contextlib
import hashlib
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from snapcap.models.dataclass import dataclass
from snapcap.models.processing.transform import ImageTransform
from snapcap.models.weights.prepared import PreparedError
from snapcap.warmup.artifacts.download import UNFINISHED, make_room, own_name, prune_weights, remove_unfinished
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.store import WEIGHTS, StoreError
from snapcap.warmup.machine.capacity import first_for_the_oom_killer, free_memory
from snapcap.warmup.machine.files import commit, locked_alone, make_folder, opened, write_all
from snapcap.warmup.machine.worker import Task, Worker, WorkerError, serve_tasks
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint, read_config
from snapcap.warmup.plan.plan import Plan, PlannedJob
from snapcap.warmup.weights.find import (
    CLOCK_NS,
    Identity,
    Record,
    content_digest,
    identify,
    is_at_rest,
    open_prepared,
    prepared_name,
    recorded_digest,
    write_record,
)

if TYPE_CHECKING:
    from snapcap.models.weights.load import Contents

_FLUSHED_BYTES = 64 << 20  # written and flushed at a time, so that other writers never wait for more
_PROCESS_BYTES = 512 << 20  # memory of this process with torch


@dataclass(frozen=True)
class Prepared:
    """Holds the result of preparing weights. ``written``: a new file; ``kept``: the file existed already; ``busy``:
    another process is preparing; ``skipped``: no file was written."""

    result: Literal["written", "kept", "busy", "skipped"]
    reason: str


def prepare_weights(folder: Path, plan: Plan, store_folder: Path, *, thorough: bool) -> Prepared:
    """Prepare the weights of a checkpoint folder for the device and dtype of a plan, unless the store has them.
    ``thorough``: verify an existing file, and replace it if it is damaged. Raises ConfigError, WeightsError,
    StoreError or OSError if the checkpoint cannot be read, or the store cannot be written."""
    store = FolderStore.open(store_folder)
    make_folder(store.root / WEIGHTS)
    with locked_alone(store.root / WEIGHTS / ".lock") as alone:
        if alone is False:
            return Prepared("busy", "another process is preparing weights")
        remove_unfinished(store.root / WEIGHTS, alone)
        unfinished = store.root / WEIGHTS / own_name(UNFINISHED, alone)
        record = _record(store, folder)
        if record is None:
            return Prepared("skipped", "the checkpoint is being changed, or its files have times in the future")
        config = read_config(folder, store_folder, plan.text_tokens, plan.image_tokens)
        transform = ImageTransform.from_folder(folder, config.vision.image_size, family=config.vision.family)
        checkpoint = Checkpoint(folder.name, folder, config, transform)
        name = prepared_name(record.digest, checkpoint, plan)
        path = store.path(f"{WEIGHTS}/{name}")
        if _is_there(store, record.digest, checkpoint, plan, thorough):
            prepared = Prepared("kept", f"in {path.parent}")
        else:
            prepared = _write(store, unfinished, path, checkpoint, plan, record.files)
        if prepared.result == "skipped" or identify(folder) != record.files:
            return prepared
        write_record(store, folder, record)
        with contextlib.suppress(StoreError):  # the next preparation removes any file that stays
            prune_weights(store, f"{WEIGHTS}/{name}")
        return prepared


def _record(store: FolderStore, folder: Path) -> Record | None:
    """Returns the record of a checkpoint's digest: an existing one, or a new one, for which the files are read once
    their times are old enough. Returns None if the files are being changed."""
    files, began = identify(folder), time.time_ns()
    if not is_at_rest(files, began):
        time.sleep(CLOCK_NS / 1e9)
        files, began = identify(folder), time.time_ns()
        if not is_at_rest(files, began):
            return None
    digest = None
    with contextlib.suppress(StoreError):  # an unusable record is replaced
        digest = recorded_digest(store, folder, files)
    digest = digest or content_digest(folder)
    return Record(files, digest, began) if identify(folder) == files else None


def _is_there(store: FolderStore, digest: str, checkpoint: Checkpoint, plan: Plan, thorough: bool) -> bool:
    try:
        mapped = open_prepared(store, digest, checkpoint, plan)
    except (PreparedError, StoreError):
        return False
    return mapped is not None and not (thorough and mapped.damaged_chunks())


def _write(
    store: FolderStore, unfinished: Path, path: Path, checkpoint: Checkpoint, plan: Plan, files: Identity
) -> Prepared:
    """Read the checkpoint on the CPU, convert it to the layout for the plan's device, and write it."""
    # The largest conversion is a cast to a dtype of twice the size, beside which int8 needs a quarter of it.
    memory = int((2.5 if plan.dtype == "int8" else 2) * sum(file.size for file in files)) + _PROCESS_BYTES
    if free_memory() < memory:
        return Prepared("skipped", f"it may take {_mib(memory)} of memory, and less is free")
    contents = _contents(checkpoint, plan, path.name)
    if not make_room(store, 2 * contents.header.size):  # the same amount stays free for others
        return Prepared("skipped", f"less than twice {_mib(contents.header.size)} of {path.parent} are free")
    try:
        _write_contents(unfinished, contents)
        if identify(checkpoint.folder) != files:
            return Prepared("skipped", "the checkpoint has changed meanwhile")
        commit(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return Prepared("written", f"in {path.parent}")


def _contents(checkpoint: Checkpoint, plan: Plan, name: str) -> "Contents":
    import torch  # noqa: PLC0415  takes seconds, and the file may exist already

    from snapcap.models.weights.load import lay_out, load_weights  # noqa: PLC0415  imports torch

    torch.set_num_threads(1)  # leaves the other CPUs to the server
    pixels, dtype = checkpoint.transform.normalisation, getattr(torch, plan.dtype)
    with torch.no_grad():
        given = (checkpoint.folder, checkpoint.config, pixels, torch.device("cpu"), dtype, plan.device_type)
        return lay_out(load_weights(*given), name)


def _write_contents(path: Path, contents: "Contents") -> None:
    """Writes the tensors, and then the header, which has their digests."""
    digests: list[str] = []
    offset = len(contents.header_bytes())
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC) as descriptor:
        for chunk in contents.chunks():
            digests.append(hashlib.sha256(chunk).hexdigest())
            write_all(descriptor, chunk, offset)
            offset += len(chunk)
            if offset % _FLUSHED_BYTES < len(chunk):
                os.fsync(descriptor)
        write_all(descriptor, contents.header_bytes(digests), 0)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


TIME_LIMIT_S = 1800.0
_MODULE = "snapcap.warmup.weights.prepare"


def weights_worker(checkpoint: Path, plan: Plan, options: StartOptions, nice: int = 0) -> Worker:
    """Returns a worker whose process is not started. ``nice`` lowers its priority (0 to 19)."""
    job = PlannedJob(checkpoint, plan, options.store_folder.absolute())
    return Worker(_MODULE, job, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, nice)


def prepare_in_worker(worker: Worker, *, thorough: bool) -> Prepared:
    """Runs ``prepare_weights`` in the worker, and ends it. An error of the worker becomes the result's reason."""
    with worker:
        try:
            answer = worker.ask({"thorough": thorough}, TIME_LIMIT_S)
        except WorkerError as error:
            return Prepared("skipped", str(error))
    return Prepared(answer["result"], answer["reason"])


def _start(job: PlannedJob) -> Task:
    first_for_the_oom_killer()

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        return asdict(prepare_weights(job.checkpoint, job.plan, job.folder, thorough=task["thorough"]))

    return answer


if __name__ == "__main__":
    sys.exit(serve_tasks(PlannedJob, _start))
