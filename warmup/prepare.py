"""The part of a start that needs no torch: bring the checkpoint, decide the plan, bring the artifacts."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from warmup.artifacts import Fetched, fetch
from warmup.checkpoint import resolve_checkpoint
from warmup.cuda_driver import CudaDriverError, open_context
from warmup.fetch_process import FetchRequest, fetch_in_child
from warmup.folder_store import FolderStore
from warmup.key import artifact_key
from warmup.manifest import Kind
from warmup.options import StartOptions
from warmup.plan import Plan, StartError, make_plan
from warmup.prepared import Artifacts, Checkpoint
from warmup.signing import KeyFileError, Trust
from warmup.status import StartupStatus
from warmup.store import StoreError, StoreRefusedError
from warmup.stores import check_store
from warmup.timeline import Timeline


@dataclass(frozen=True)
class Preparation:
    """What runs beside the import of torch: first the checkpoint and the plan, then the artifacts and a GPU's
    context, for which nobody has to wait.

    ``artifacts`` is None where the backend uses none.
    """

    model: "Future[tuple[Checkpoint, Plan]]"
    artifacts: "Future[Artifacts | None]"


def prepare(
    options: StartOptions,
    timeline: Timeline,
    status: StartupStatus,
    pool: ThreadPoolExecutor,
    on_checkpoint: Callable[[Checkpoint], object],
) -> Preparation:
    """Begin on the threads of ``pool``, which must have three. One of them calls ``on_checkpoint``."""
    model = pool.submit(_model, options, timeline, on_checkpoint)
    pool.submit(_open_context, model)

    def artifacts() -> Artifacts | None:
        if options.backend == "eager":
            return None
        checkpoint, plan = model.result()
        with timeline.phase("fetch_artifacts"):
            found = find_artifacts(checkpoint, plan, options, options.kind)
        status.fetched(found)
        return found

    return Preparation(model, pool.submit(artifacts))


def _open_context(model: "Future[tuple[Checkpoint, Plan]]") -> None:
    _, plan = model.result()
    if plan.device_type == "cuda":
        with contextlib.suppress(CudaDriverError):  # torch is going to say what is wrong
            open_context(int(plan.device.partition(":")[2] or 0))


def trust_of(options: StartOptions) -> Trust:
    """Whose signatures the store's artifacts may carry.

    Raises:
        StartError: a key file cannot be read, or an S3 store is given without any trust.
    """
    store = options.store
    try:
        trust = Trust.from_files(store.trusted_keys, store.allow_unsigned)
        check_store(store.address, trust)
    except (KeyFileError, StoreRefusedError) as error:
        raise StartError(str(error)) from None
    return trust


def find_artifacts(checkpoint: Checkpoint, plan: Plan, options: StartOptions, kind: Kind) -> Artifacts:
    """Bring the artifact set of this plan to the local folder, verified, or say why there is none.

    Raises:
        StartError: the store must not be opened as configured.
    """
    trust = trust_of(options)
    factors = plan.factors(checkpoint.config, kind)
    key = artifact_key(factors)
    store = options.store
    try:
        if store.remote is not None:
            request = FetchRequest(
                store=store.remote,
                local=store.folder,
                key=key,
                factors=factors,
                s3=options.s3,
                trusted_keys=store.trusted_keys,
                allow_unsigned=store.allow_unsigned,
                deadline=store.deadline,
            )
            fetched = fetch_in_child(request)
        else:
            fetched = fetch(None, FolderStore.open(store.folder), key, factors, trust, store.deadline)
    except StoreError as error:  # the local folder: without it nothing can be loaded, but eager can be served
        fetched = Fetched("error", str(error))
    signatures = fetched.manifest.metadata.get("signatures", {}) if fetched.manifest else {}
    return Artifacts(key, factors, fetched, signatures)


def _model(
    options: StartOptions, timeline: Timeline, on_checkpoint: Callable[[Checkpoint], object]
) -> tuple[Checkpoint, Plan]:
    with timeline.phase("fetch_weights"):
        checkpoint = read_checkpoint(options)
    on_checkpoint(checkpoint)
    return checkpoint, make_plan(checkpoint.config, options)


def read_checkpoint(options: StartOptions) -> Checkpoint:
    """Bring the checkpoint's files to this machine and read all but the weights.

    Raises:
        CheckpointError, ConfigError: the source or its files cannot be used.
    """
    folder = resolve_checkpoint(options.model, options.cache_dir, options.s3)
    from models.config import ModelConfig  # noqa: PLC0415  a server must not wait for it before it listens

    return Checkpoint.of(options.model, folder, ModelConfig.from_folder(folder), options.max_pixels)
