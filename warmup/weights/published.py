"""Fetches a published model for a start, through a worker process that this process does not trust.

This process verifies the manifest's signature and the small files' digests again. The worker has verified the
chunks of the weights; this process runs the same checks as for local prepared weights: the file's owner, size and
header, and the checkpoint of which the weights were made. Imports no torch and no botocore.
"""

import contextlib
import io
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from snapcap.models.weights.prepared import PreparedError
from snapcap.warmup.artifacts.download import VERIFIED, fetched_name, fetching_name
from snapcap.warmup.artifacts.fetch import Described, Fetched, Found, NotFetchedError, local_model, local_weights
from snapcap.warmup.artifacts.folder import FolderStore, check_owner
from snapcap.warmup.artifacts.key import Factors, artifact_key
from snapcap.warmup.artifacts.remote import trust_of
from snapcap.warmup.artifacts.signing import Trust
from snapcap.warmup.artifacts.store import WEIGHTS, StoreError, blob_name
from snapcap.warmup.artifacts.worker import GRACE, Fetcher
from snapcap.warmup.checkpoints import hub
from snapcap.warmup.checkpoints.local import kind_of, report_unasked
from snapcap.warmup.errors import StartError
from snapcap.warmup.machine.files import open_regular
from snapcap.warmup.machine.worker import Worker
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.weights.find import FoundWeights, map_used, model_factors, prepared_name

FINISH_S = 600.0
_logger = logging.getLogger("snapcap.weights")


class ModelFetcher(Fetcher):
    """Fetches a model's weights and, in parallel, its packages. Call ``describe``, then ``packages`` and
    ``weights`` in this order, then ``close``, which ends the worker. Thread-safe."""

    def __init__(self, options: StartOptions, worker: Worker | None = None) -> None:
        super().__init__(options, worker)
        self._fetched = 0  # bytes of weights that the worker has downloaded, and syncs before it ends
        self._end = time.monotonic() + options.store.deadline + GRACE  # deadline of all tasks before the weights

    def begin(self) -> None:
        """Start the worker on a thread, because its imports take longer than the caller's preparation."""

        def start() -> None:
            with self._lock, contextlib.suppress(Exception):  # the first task raises the error again
                self._worker.start(self._end - time.monotonic())

        threading.Thread(target=start, name="snapcap-fetcher", daemon=True).start()

    @cached_property
    def _factors(self) -> Factors:
        return model_factors(self._options)

    @cached_property
    def _trust(self) -> Trust:
        return trust_of(self._options.store)

    def describe(self, download: bool = True) -> Described:
        """Returns the verified description of the model, in its source's present revision. ``download``: begin to
        download the weights. Raises NotFetchedError if there is no usable published model."""
        try:
            local, key = FolderStore.open(self._options.store_folder), artifact_key(self._factors)
            cached = self._pinned(local, key)
            if cached is not None:
                return cached
            told = self._bring({"do": "model", "factors": self._factors, "download": download}, self._end)
            if told.unasked:
                report_unasked(self._options.model.source, told.unasked)
            model = local_model(local, key, self._trust)
            if model is None:
                raise NotFetchedError(Fetched("error", "the files that the worker process fetched are missing"))
            return model
        except Exception as error:
            raise NotFetchedError(Fetched.failed(error)) from error

    def weights(self, model: Described, checkpoint: Checkpoint, plan: Plan) -> FoundWeights:
        """Wait until the weights are downloaded, and map them. Raises nothing."""
        try:
            return self._weights(model, checkpoint, plan)
        except PreparedError as error:
            self._set_aside(model.found)
            return FoundWeights("corrupt", str(error))
        except Exception as error:
            failed = Fetched.failed(error)
            return FoundWeights(failed.result, failed.reason)

    def _set_aside(self, found: Found) -> None:
        """Removes damaged weights, which the next start fetches, or logs that they must be published again."""
        with contextlib.suppress(OSError):
            (self._options.store_folder / WEIGHTS / fetched_name(found.weights.content)).unlink()
        if not found.vouched:
            return
        blob = found.weights.file
        with contextlib.suppress(StartError, StoreError):
            local = FolderStore.open(self._options.store_folder)
            # Only a file whose content does not match its name is removed.
            if local.size(blob_name(blob)) is not None and local.verified(blob) is None:
                _logger.warning(
                    "damaged weights removed; snapcap build --weights publishes them again",
                    extra={"fields": {"file": blob_name(blob), "store": local.location}},
                )

    def close(self) -> None:
        """Wait until the weights are synced to the disk, and end the worker. A failure is logged."""
        try:
            if self._fetched:
                self._bring({"do": "finish"}, time.monotonic() + FINISH_S + GRACE)
        except NotFetchedError as error:
            fields = {"reason": str(error)}
            _logger.warning("weights are fetched again by the next start", extra={"fields": fields})
        finally:
            super().close()

    def _pinned(self, local: FolderStore, key: str) -> Described | None:
        """Returns the model in the folder if the source names a commit and the folder has that commit. A commit
        never changes, so no store is asked."""
        source = self._options.model.source
        commit = hub.pinned_commit(source) if kind_of(source) == "hub" else None
        if commit is None:
            return None
        with contextlib.suppress(ValueError, StoreError):  # a damaged model is fetched again
            model = local_model(local, key, self._trust)
            if model is not None and local_weights(local, model.found) is not None:
                return model if model.found.weights.identity == {"commit": commit} else None
        return None

    def _weights(self, model: Described, checkpoint: Checkpoint, plan: Plan) -> FoundWeights:
        local, wanted = FolderStore.open(self._options.store_folder), model.found.weights
        if local_weights(local, model.found) is None:
            self._fetched = self._bring({"do": "weights"}).bytes_fetched
        name = prepared_name(wanted.checkpoint, checkpoint, plan)
        with self._opened(local, model.found) as file:
            mapped = map_used(file, name)
        if len(mapped.memory) != wanted.size:
            raise PreparedError("the file of weights has not the size in its manifest")
        size = f"{wanted.size / (1 << 20):.1f} MiB"
        return FoundWeights("hit", f"{size} published {model.found.manifest.created}", mapped, self._fetched)

    @contextlib.contextmanager
    def _opened(self, local: FolderStore, found: Found) -> Iterator[io.BufferedReader]:
        """Opens the file of weights by its final name, or by its temporary name while it is not yet synced."""
        if self._fetched:
            path = local.root / WEIGHTS / fetching_name(found.weights.content, VERIFIED)
            with open_regular(path) as file:
                check_owner(path, os.fstat(file.fileno()))
                yield file
            return
        name = local_weights(local, found)
        if name is None:
            raise StoreError("another process has removed the weights")
        with local.opened(name) as opened:
            if opened is None:
                raise StoreError(f"{name} does not exist any more")
            yield opened

    def _bring(self, task: Mapping[str, Any], end: float | None = None) -> Fetched:
        """Returns the worker's answer to a task. Raises NotFetchedError if the task failed."""
        told = self._ask(task, end)
        if told.result != "hit":
            raise NotFetchedError(told)
        return told
