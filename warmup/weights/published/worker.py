"""Brings a published model from its store in a process of its own: what talks to S3 and the hub is imported there.

    job   {"store": …, "s3": …, "folder": …, "source": …}, then each of these once
    task  {"do": "find", "factors": …, "download": …}    the manifest and the small files; then the weights begin
          {"do": "packages", "key": …, "factors": …}    the artifact set, meanwhile
          {"do": "weights"}                waits for the weights
          {"do": "finish"}                 waits for the disk

Run as ``python -m snapcap.warmup.weights.published.worker``.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from snapcap.models.config import ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.warmup.artifacts.envelope import ManifestError
from snapcap.warmup.artifacts.key import Factors
from snapcap.warmup.machine.worker import serve_tasks
from snapcap.warmup.options import S3Options, StoreOptions, is_remote
from snapcap.warmup.store.fetch import fetch
from snapcap.warmup.store.folder import FolderStore
from snapcap.warmup.store.open import open_store, read_trust
from snapcap.warmup.store.s3 import S3Store
from snapcap.warmup.store.store import ArtifactStore, StoreError, model_name
from snapcap.warmup.store.worker import told
from snapcap.warmup.weights.published.bounds import most_bytes
from snapcap.warmup.weights.published.download import Downloaded, download_weights, finish
from snapcap.warmup.weights.published.fetch import (
    FoundModel,
    NotFetchedError,
    described,
    find_model,
    weights_at_hand,
)
from snapcap.warmup.weights.published.prune import mark_used, prune_models
from snapcap.warmup.weights.published.source import current_identity


@dataclass(frozen=True)
class ModelJob:
    """The store, the local folder, and the source of the model."""

    store: StoreOptions
    s3: S3Options
    folder: Path
    source: str


class _Bringing:
    """Answers the tasks of fetching a model."""

    def __init__(self, job: ModelJob) -> None:
        self._job = job
        self._local = FolderStore.open(job.folder)
        self._trust = read_trust(job.store)
        # Opening the store takes longer than the parent takes to send its first task.
        self._remote = open_store(job.store.address, job.s3, self._trust) if is_remote(job.store.address) else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapcap-download")
        self._scope = contextlib.ExitStack()
        self._until = time.monotonic() + job.store.deadline
        self._found: FoundModel | None = None
        self._weights: Future[Downloaded] | None = None

    def answer(self, task: dict[str, Any]) -> dict[str, Any]:
        work: Callable[[], dict[str, Any]]
        match task["do"]:
            case "packages":
                given = task["key"], task["factors"], self._trust, self._job.store.deadline
                return told(fetch(self._remote, self._local, *given))
            case "find":
                work = partial(self._find, task["factors"], task["download"])
            case "weights":
                work = self._wait
            case _:
                work = self._finish
        try:
            return {"result": "hit", **work()}
        except Exception as error:
            failed = NotFetchedError.of(error)
            return {"result": failed.result, "reason": failed.reason}

    def _find(self, factors: Factors, download: bool) -> dict[str, Any]:
        job, remote = self._job, self._remote
        client = remote.s3 if isinstance(remote, S3Store) else None
        identify = partial(current_identity, job.source, job.s3, self._until, client)
        found = find_model(remote, self._local, factors, self._trust, identify, self._until)
        self._found = found
        if (folder := described(self._local, found.manifest)) is not None:
            mark_used(folder, self._local.path(model_name(found.manifest.key)))
        if download:
            self._begin(remote or self._local, found)
        return {"reason": (remote or self._local).location, "unasked": found.unasked}

    def _begin(self, source: ArtifactStore, found: FoundModel) -> None:
        """Have the weights come on another thread, where they are not there."""
        if weights_at_hand(self._local, found) is not None:
            return
        folder, size = described(self._local, found.manifest), found.manifest.weights.size
        if folder is None or size > most_bytes(ModelConfig.from_folder(folder)):
            raise ManifestError(f"the manifest's weights have {size} bytes, more than its configuration implies")
        given = (source, self._local, found.manifest, self._until, self._scope)
        self._weights = self._pool.submit(download_weights, *given)

    def _wait(self) -> dict[str, Any]:
        if self._weights is None:
            return {"bytes_fetched": 0, "unfinished": False}
        try:
            downloaded = self._weights.result()
        except BaseException:
            self._scope.close()
            raise
        if not downloaded.unfinished:
            self._scope.close()
        return {"bytes_fetched": downloaded.bytes_fetched, "unfinished": downloaded.unfinished}

    def _finish(self) -> dict[str, Any]:
        if self._found is None:
            raise StoreError("there is nothing to finish")
        with self._scope:
            finish(self._local, self._found.manifest)
            if self._remote is not None:
                prune_models(self._local)
        return {}


if __name__ == "__main__":
    sys.exit(serve_tasks(ModelJob, lambda job: _Bringing(job).answer))
