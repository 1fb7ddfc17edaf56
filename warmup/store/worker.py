"""Moves artifact sets between S3 and the local folder in a process of its own.

Importing boto3 is half a second of Python that would hold the lock which ``import torch`` needs; a worker process
does it beside, and a server that serves never imports it. The worker brings a set to the local folder; the parent
verifies it there again, and believes the worker nothing.

    job   {"store": …, "s3": …, "folder": …, "key": …, "factors": …}, then {"do": "fetch"}
                                                       or {"do": "publish", "replace": …}

Run as ``python -m snapcap.warmup.store.worker``.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.key import Difference, Factors
from snapcap.warmup.artifacts.signing import KeyFileError, Trust, load_signer
from snapcap.warmup.errors import first_line
from snapcap.warmup.machine.worker import Task, Worker, WorkerError, WorkerTimeoutError, serve_tasks
from snapcap.warmup.options import S3Options, StartOptions, StoreOptions
from snapcap.warmup.store.fetch import Fetched, Result, fetch
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.open import open_store, read_trust
from snapcap.warmup.store.store import StoreError

if TYPE_CHECKING:
    from snapcap.warmup.store.publish import Published

GRACE = 3.0  # seconds for starting Python, and for the worker to say itself that its time was over
_MODULE = "snapcap.warmup.store.worker"


@dataclass(frozen=True)
class StoreJob:
    """Describes a set to fetch or publish, with the store in S3 and the local folder. ``store`` names the signing
    key only if the worker has to sign."""

    store: StoreOptions
    s3: S3Options
    folder: Path
    key: str
    factors: Factors = field(default_factory=dict)

    @classmethod
    def of(cls, options: StartOptions, key: str, factors: Factors, *, signs: bool = False) -> "StoreJob":
        store = replace(
            options.store,
            trusted_keys=options.store.accepted_keys,
            sign_key=options.store.sign_key if signs else None,
            remote_cache="",  # the address may hold a password, and only compilers need it
        )
        return cls(store, options.s3, options.store_folder, key, factors)


def fetch_in_worker(job: StoreJob, trust: Trust, ask: Callable[[StoreJob], Fetched] | None = None) -> Fetched:
    """``fetch`` with the remote's part in a worker process, which is ended at the store's deadline.

    No process is started for what the local folder has. ``trust``: that of the job's keys. ``ask``: has a worker
    do it that is there already.

    Raises:
        StoreRefusedError: the local folder cannot be used.
    """
    started = time.monotonic()
    local = FolderStore.open(job.folder)
    found = _from_folder(job, local, trust)
    if found.result != "hit":
        told = (ask or _ask_to_fetch)(job)
        # The worker's answer gives a reason for the log. Only files that this process then verifies can be run.
        here = _from_folder(job, local, trust) if told.result == "hit" else told
        found = replace(here, reason=told.reason) if here.result == "hit" else here
        found = replace(found, bytes_fetched=told.bytes_fetched)
    return replace(found, seconds=time.monotonic() - started)


def publish_in_worker(key: str, options: StartOptions, replace: bool) -> "Published":
    """Publish the set of a key that is in the local folder to the remote store, without importing boto3 here; a
    remote that takes longer than ``build_timeout`` is given up."""
    from snapcap.warmup.store.publish import Published  # noqa: PLC0415  not for a start, which only fetches

    with Worker(_MODULE, StoreJob.of(options, key, {}, signs=True)) as worker:
        try:
            answer = worker.ask({"do": "publish", "replace": replace}, options.store.build_timeout)
        except WorkerError as error:
            return Published("error", str(error))
    return Published(answer["result"], answer["reason"])


def _from_folder(job: StoreJob, local: FolderStore, trust: Trust) -> Fetched:
    return fetch(None, local, job.key, job.factors, trust, job.store.deadline)


def _ask_to_fetch(job: StoreJob) -> Fetched:
    with Worker(_MODULE, job) as worker:
        return ask_to_fetch(worker, job, {"do": "fetch"})


def ask_to_fetch(worker: Worker, job: StoreJob, task: Mapping[str, Any]) -> Fetched:
    """Sends a fetch task to a worker and returns its answer. The worker is ended at the deadline. The task must be
    one that the worker answers with ``told``."""
    deadline = job.store.deadline
    end = time.monotonic() + deadline + GRACE
    try:
        worker.start(end - time.monotonic())
        return _parsed(worker.ask(task, end - time.monotonic()))
    except WorkerTimeoutError:
        return Fetched("error", f"fetching from {job.store.address} was ended after {deadline:g} s")
    except (WorkerError, ValueError, TypeError, KeyError, OverflowError) as error:
        return Fetched("error", f"the process that fetches artifacts gave no answer: {first_line(error)}")


def told(fetched: Fetched) -> dict[str, Any]:
    """Serialises a fetch result for the parent process, without files: the parent looks those up by itself."""
    return {
        "result": fetched.result,
        "reason": fetched.reason,
        "bytes_fetched": fetched.bytes_fetched,
        "differences": [asdict(difference) for difference in fetched.differences],
    }


def _parsed(value: Mapping[str, Any]) -> Fetched:
    """The reverse of ``told``."""
    if value["result"] not in get_args(Result):
        raise ValueError("not a result")
    return Fetched(
        result=cast("Result", value["result"]),
        reason=str(value["reason"]),
        bytes_fetched=int(value["bytes_fetched"]),
        differences=tuple(Difference(**difference) for difference in value["differences"]),
    )


def _fetch(job: StoreJob) -> Fetched:
    try:
        trust = read_trust(job.store)
        remote = open_store(job.store.address, job.s3, trust)
        local = FolderStore.open(job.folder)
    except (KeyFileError, StoreError) as error:
        return Fetched("error", str(error))
    return fetch(remote, local, job.key, job.factors, trust, job.store.deadline)


def _publish(job: StoreJob, replace: bool) -> "Published":
    """If it could be loaded from the local folder: signing makes it good for every server."""
    from snapcap.warmup.store.publish import publish  # noqa: PLC0415  loaded only when needed

    trust = read_trust(job.store)
    remote = open_store(job.store.address, job.s3, trust)
    signer = load_signer(job.store.sign_key) if job.store.sign_key else None
    found = _from_folder(job, FolderStore.open(job.folder), trust)
    if found.manifest is None:
        raise StoreError(found.reason)
    files = {name: file.path for name, file in found.entries.items()}
    return publish(remote, found.manifest, files, signer, replace)


def _start(job: StoreJob) -> Task:
    def answer(task: dict[str, Any]) -> dict[str, Any]:
        return told(_fetch(job)) if task["do"] == "fetch" else asdict(_publish(job, task["replace"]))

    return answer


if __name__ == "__main__":
    sys.exit(serve_tasks(StoreJob, _start))
