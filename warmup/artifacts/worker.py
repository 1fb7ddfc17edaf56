"""Moves artifacts between a store and the local folder in a process of its own.

Importing botocore takes a third of a second and would hold the interpreter lock that ``import torch`` needs. So a
worker process imports it, and a server never does. The worker downloads files to the local folder. The parent does
not trust the worker, and verifies the files again.

    job   {"store": …, "s3": …, "folder": …, "source": …}
    task  {"do": "packages", "key": …, "factors": …}    fetches an artifact set
          {"do": "model", "factors": …, "download": …}  fetches a model's small files, begins with its weights
          {"do": "weights"}                             waits until the weights are downloaded
          {"do": "finish"}                              waits until the weights are synced to the disk
          {"do": "publish", "key": …, "replace": …}     publishes the folder's set to the remote store

Run as ``python -m snapcap.warmup.artifacts.worker``.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast, get_args

from snapcap.warmup.artifacts.download import download_weights, finish, mark_used, prune_models
from snapcap.warmup.artifacts.fetch import (
    Artifacts,
    Fetched,
    Found,
    Result,
    described,
    fetch,
    fetch_model,
    local_weights,
)
from snapcap.warmup.artifacts.folder import FolderStore
from snapcap.warmup.artifacts.key import Difference, Factors, artifact_key
from snapcap.warmup.artifacts.remote import S3Store, open_store, trust_of
from snapcap.warmup.artifacts.signing import Trust, load_signer
from snapcap.warmup.artifacts.store import ArtifactStore, StoreError, model_name
from snapcap.warmup.errors import first_line
from snapcap.warmup.machine.worker import Worker, WorkerError, WorkerTimeoutError, serve_tasks
from snapcap.warmup.options import FetchJob, StartOptions, is_remote

if TYPE_CHECKING:
    from snapcap.warmup.artifacts.publish import Published

MODULE = "snapcap.warmup.artifacts.worker"
GRACE = 3.0  # seconds for starting Python, and for the worker to report its own timeout


class Fetcher:
    """Fetches through a worker process, which starts with the first task that needs it. The worker does one task at
    a time, and is ended at the deadline of a task. A context manager; thread-safe."""

    def __init__(self, options: StartOptions, worker: Worker | None = None) -> None:
        """``worker``: the worker of this module, if its process was launched already."""
        self._options = options
        self._worker = worker or Worker(MODULE, FetchJob.of(options))
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the worker."""
        self._worker.stop()

    def packages(self, key: str, factors: Factors, trust: Trust) -> Fetched:
        """Does what ``fetch`` does; the worker reads the remote store, if there is one. A set in the local folder
        needs no worker. ``trust``: the trust of the options. Raises StoreRefusedError if the local folder cannot be
        used."""
        started, store = time.monotonic(), self._options.store
        local = FolderStore.open(self._options.store_folder)
        look = partial(fetch, None, local, key, factors, trust, store.deadline)
        found = look()
        if found.result != "hit" and store.remote is not None:
            told = self._ask({"do": "packages", "key": key, "factors": factors})
            # The worker's answer gives a reason for the log. Only files that this process then verifies can be run.
            here = look() if told.result == "hit" else told
            found = replace(here, reason=told.reason) if here.result == "hit" else here
            found = replace(found, bytes_fetched=told.bytes_fetched)
        return replace(found, seconds=time.monotonic() - started)

    def _ask(self, task: Mapping[str, Any], end: float | None = None) -> Fetched:
        """Returns the worker's answer to a task, or an error result if the worker fails or takes too long. ``end``:
        the moment of ``time.monotonic()`` at which the worker is ended. None: the store's deadline counts from the
        moment at which the worker is free for this task."""
        with self._lock:
            store, began = self._options.store, time.monotonic()
            end = end or began + store.deadline + GRACE
            try:
                self._worker.start(end - time.monotonic())
                return _parsed(self._worker.ask(task, end - time.monotonic()))
            except WorkerTimeoutError:
                where, seconds = store.address or self._options.store_folder, round(end - began - GRACE, 1)
                return Fetched("error", f"fetching from {where} was ended after {seconds:g} s")
            except (WorkerError, ValueError, TypeError, KeyError, OverflowError) as error:
                reason = f"the process that fetches artifacts gave no answer: {first_line(error)}"
                return Fetched("error", reason)


def find_artifacts(options: StartOptions, factors: Factors, fetcher: Fetcher | None = None) -> Artifacts:
    """Looks up the artifact set of these factors in the local folder, then in the remote store, from which the set
    is downloaded. ``fetcher``: reads the remote store; None makes a new one. Raises StartError if the store must
    not be opened as configured."""
    key, trust = artifact_key(factors), trust_of(options.store)
    try:
        with contextlib.nullcontext(fetcher) if fetcher else contextlib.closing(Fetcher(options)) as fetching:
            return Artifacts(key, factors, fetching.packages(key, factors, trust))
    except StoreError as error:  # without the local folder no artifact can be loaded, but eager can serve
        return Artifacts(key, factors, Fetched("error", str(error)))


def publish_in_worker(key: str, options: StartOptions, replace: bool) -> "Published":
    """Publish the local folder's set of a key to the remote store, without importing botocore in this process.
    Gives up after ``build_timeout`` seconds."""
    from snapcap.warmup.artifacts.publish import Published  # noqa: PLC0415  not for a start, which only fetches

    with Worker(MODULE, FetchJob.of(options, signs=True)) as worker:
        try:
            task = {"do": "publish", "key": key, "replace": replace}
            answer = worker.ask(task, options.store.build_timeout)
        except WorkerError as error:
            return Published("error", str(error))
    return Published(answer["result"], answer["reason"])


def _told(fetched: Fetched) -> dict[str, Any]:
    """Serialises a fetch result for the parent process, without files: the parent looks up the files itself."""
    return {
        "result": fetched.result,
        "reason": fetched.reason,
        "bytes_fetched": fetched.bytes_fetched,
        "differences": [asdict(difference) for difference in fetched.differences],
        "unasked": fetched.unasked,
    }


def _parsed(value: Mapping[str, Any]) -> Fetched:
    """Parses the result of ``_told``. Raises ValueError if the value is no such result."""
    if value["result"] not in get_args(Result):
        raise ValueError("not a result")
    return Fetched(
        result=cast("Result", value["result"]),
        reason=str(value["reason"]),
        bytes_fetched=int(value["bytes_fetched"]),
        differences=tuple(Difference(**difference) for difference in value["differences"]),
        unasked=str(value["unasked"]),
    )


class _Answering:
    """Answers tasks in the worker process."""

    def __init__(self, job: FetchJob) -> None:
        self._job = job
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapcap-download")
        self._scope = contextlib.ExitStack()
        self._until = time.monotonic() + job.store.deadline
        self._found: Found | None = None
        self._weights: Future[int] | None = None
        # This takes longer than the parent takes to send its first task.
        with contextlib.suppress(Exception):  # a task that needs the store says what is wrong
            _ = self._remote

    @cached_property
    def _trust(self) -> Trust:
        return Trust.of(self._job.store)

    @cached_property
    def _remote(self) -> ArtifactStore | None:
        address = self._job.store.address
        return open_store(address, self._job.s3, self._trust) if is_remote(address) else None

    @cached_property
    def _local(self) -> FolderStore:
        return FolderStore.open(self._job.folder)

    def answer(self, task: dict[str, Any]) -> dict[str, Any]:
        if task["do"] == "publish":
            return asdict(self._publish(task["key"], task["replace"]))
        try:
            match task["do"]:
                case "packages":
                    given = task["key"], task["factors"], self._trust, self._job.store.deadline
                    fetched = fetch(self._remote, self._local, *given)
                case "model":
                    fetched = self._describe(task["factors"], task["download"])
                case "weights":
                    fetched = self._wait()
                case _:
                    fetched = self._finish()
        except Exception as error:
            fetched = Fetched.failed(error)
        return _told(fetched)

    def _describe(self, factors: Factors, download: bool) -> Fetched:
        from snapcap.warmup.checkpoints.source import current_identity  # noqa: PLC0415  only models have a source

        job, remote, local = self._job, self._remote, self._local
        client = remote.s3 if isinstance(remote, S3Store) else None
        identify = partial(current_identity, job.source, job.s3, self._until, client)
        found = fetch_model(remote, local, factors, self._trust, identify, self._until)
        self._found = found
        if (folder := described(local, found.manifest)) is not None:
            mark_used(folder, local.path(model_name(found.manifest.key)))
        if download and local_weights(local, found) is None:
            given = (remote or local, local, found.weights, self._until, self._scope)
            self._weights = self._pool.submit(download_weights, *given)
        return Fetched("hit", (remote or local).location, unasked=found.unasked)

    def _wait(self) -> Fetched:
        if self._weights is None:
            return Fetched("hit", "the weights were there")
        try:
            size = self._weights.result()
        except BaseException:
            self._scope.close()
            raise
        if not size:
            self._scope.close()
        return Fetched("hit", "", bytes_fetched=size)

    def _finish(self) -> Fetched:
        if self._found is None:
            raise StoreError("there is nothing to finish")
        with self._scope:
            finish(self._local, self._found.weights)
            if self._remote is not None:
                prune_models(self._local)
        return Fetched("hit", "")

    def _publish(self, key: str, replace: bool) -> "Published":
        """Signs and publishes a usable set of the local folder. Every server can trust the signature."""
        from snapcap.warmup.artifacts.publish import publish  # noqa: PLC0415  loaded only when needed

        store, remote = self._job.store, self._remote
        if remote is None:
            raise StoreError("there is no remote store to publish to")
        signer = load_signer(store.sign_key) if store.sign_key else None
        found = fetch(None, self._local, key, {}, self._trust, store.deadline)
        if found.manifest is None:
            raise StoreError(found.reason)
        files = {name: file.path for name, file in found.entries.items()}
        return publish(remote, found.manifest, files, signer, replace=replace)


if __name__ == "__main__":
    sys.exit(serve_tasks(FetchJob, lambda job: _Answering(job).answer))
