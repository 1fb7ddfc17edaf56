"""Starts a compiled model without torch's Python module, whose import takes longer than all the rest.

Such a start needs the packages of the artifact set and prepared weights. A start that lacks either imports torch.
"""

import logging
import traceback
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import MAX_BEAMS
from snapcap.models.regions.names import ON_DEMAND
from snapcap.models.weights.prepared.mapped import MappedWeights
from snapcap.warmup.errors import StartError, first_line
from snapcap.warmup.machine.cpus import available_cpus, whole_cpus
from snapcap.warmup.machine.torch_libraries import load_torch_libraries
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.artifacts import CPU_LIBRARY, Artifacts
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.aoti.container import AotiError, CaptureError, Container
from snapcap.warmup.runtime.aoti.cpu_library import open_cpu_library
from snapcap.warmup.runtime.aoti.packages import region_of
from snapcap.warmup.start.preparation import Preparation
from snapcap.warmup.start.started import StartedModel
from snapcap.warmup.store.store import WEIGHTS
from snapcap.warmup.weights.find import FoundWeights
from snapcap.warmup.weights.published.source import may_be_published

if TYPE_CHECKING:
    from snapcap.models.config import ModelConfig
    from snapcap.warmup.runtime.aoti.native_cuda_tensors import NativeCudaMemory
    from snapcap.warmup.runtime.aoti.native_packages import NativePackages
    from snapcap.warmup.runtime.aoti.native_tensors import NativeMemory, NativeTensor
    from snapcap.warmup.runtime.devices.device import Device
    from snapcap.warmup.store.blobs import VerifiedFile
    from snapcap.warmup.store.fetch import Fetched

_OPENERS = 3, 5  # at least and at most: a package is unpacked, mapped and given to the driver without Python's lock
_logger = logging.getLogger("snapcap.start")


@dataclass(frozen=True)
class Found:
    """Holds all that a start without torch needs."""

    checkpoint: Checkpoint
    plan: Plan
    weights: FoundWeights
    mapped: MappedWeights
    artifacts: Artifacts


def torch_is_needed(options: StartOptions) -> str | None:
    """Why torch's module has to be imported, where that is certain: it begins at once then."""
    if options.compute.backend in ("eager", "jit"):
        return f"the {options.compute.backend} backend was asked for"
    if not options.model.prepared_weights:
        return "prepared weights are off"
    if may_be_published(options) or any((options.store_folder / WEIGHTS).glob("*.safetensors")):
        return None
    return "there are no prepared weights yet"


def find_without_torch(preparation: Preparation) -> Found | str:
    """Waits for all that a start without torch needs. Returns it, or the reason as soon as a part is known to be
    missing.

    Raises:
        CheckpointError, ConfigError, StartError: the model cannot be served.
    """
    missing: set[Future[Any]] = {preparation.model, preparation.artifacts, preparation.unprepared}
    # A result may show that the start needs torch; then the other results are not waited for.
    while not (preparation.model.done() and preparation.artifacts.done()):
        missing = wait(missing, return_when=FIRST_COMPLETED).not_done
        if preparation.unprepared.done():
            return "there are no prepared weights of this model"
        if preparation.model.done() and preparation.model.result()[2].mapped is None:
            return _missing("prepared weights", preparation.model.result()[2])
        if preparation.artifacts.done() and not _is_hit(preparation.artifacts.result()):
            break
    artifacts = preparation.artifacts.result()
    if artifacts is None or not artifacts.hit:
        return "there are no artifacts" if artifacts is None else _missing("artifacts", artifacts.fetched)
    checkpoint, plan, weights = preparation.model.result()
    if weights.mapped is None:
        return _missing("prepared weights", weights)
    if _needs_eager(checkpoint.config, plan):
        return "more tokens end a caption than a compiled beam search looks at"
    return Found(checkpoint, plan, weights, weights.mapped, artifacts)


def start_without_torch(
    found: Found, options: StartOptions, timeline: Timeline, status: StartupStatus
) -> StartedModel | None:
    """A warm model, or None where something does not work, so that torch is needed. Then the thread's CUDA stream
    may be another than the default one.

    Raises:
        StartError: a setting does not fit, or weights or device are damaged.
    """
    try:
        return _start(found, options, timeline, status)
    except StartError:
        raise
    except CaptureError as error:
        raise StartError(f"{error}; --no-prepared-weights starts another way") from error
    except Exception as error:
        fields = {"error": first_line(error)}
        _logger.warning("the start needs torch's module after all", exc_info=True, extra={"fields": fields})
        # The frames hold the buffers that the start allocated, and no garbage collector runs in a server.
        traceback.clear_frames(error.__traceback__)
        return None


def _missing(what: str, found: "Fetched | FoundWeights") -> str:
    return f"the start found {what}: {found.result}, {found.reason}"


def _is_hit(artifacts: Artifacts | None) -> bool:
    return artifacts is not None and artifacts.hit


def _needs_eager(config: "ModelConfig", plan: Plan) -> bool:
    """Returns whether more tokens end a caption than a compiled beam search looks at, in any bucket that has room
    for a beam search."""
    sizes = [size for size in plan.buckets if size > 1]
    return bool(sizes) and len(config.generation.eos_ids) > min(MAX_BEAMS, *sizes)


def _start(found: Found, options: StartOptions, timeline: Timeline, status: StartupStatus) -> StartedModel:
    from snapcap.models.regions.state.kv_cache import DecodeState  # noqa: PLC0415  no other start needs it
    from snapcap.models.regions.table import build_regions  # noqa: PLC0415
    from snapcap.warmup.runtime.backends.aot import AotBackend  # noqa: PLC0415
    from snapcap.warmup.runtime.model import Model, check_weights  # noqa: PLC0415
    from snapcap.warmup.runtime.runner import Runner  # noqa: PLC0415
    from snapcap.warmup.start.warmer import Warmer, self_test  # noqa: PLC0415

    plan, artifacts = found.plan, found.artifacts
    now = options.before_ready(plan.table.buckets)
    entries = artifacts.fetched.entries
    with timeline.phase("load_libraries"):
        library = _cpu_library(entries.get(CPU_LIBRARY))
        standalone = library is not None
        library = library or load_torch_libraries()
    if library is None:
        raise AotiError("torch's libraries cannot be loaded")
    # Mapped on other threads: what is there can run.
    least, most = _OPENERS
    openers = max(least, min(available_cpus() // 2, most))
    with ThreadPoolExecutor(openers, thread_name_prefix="snapcap-packages") as pool:
        opening = _open_packages(entries, plan.device, standalone, pool, timeline)
        config = found.checkpoint.config
        with ExitStack() as beside:
            with timeline.phase("device_init"):
                # The CPU library's helpers hold nobody up. But a batch comes of several clients, whose next images
                # are decoded meanwhile.
                alone = (options.compute.threads or whole_cpus()) if standalone else plan.threads
                device, memory, packages = _open_device(library, plan, alone, standalone, opening, beside)
            with timeline.phase("load_weights"):
                regions = build_regions(config)
                check_weights(found.mapped, regions)
                loaded = memory.weights(found.mapped)
                slots = plan.table.largest.size
                state = DecodeState.allocate(config, slots, plan.cache_length, device.memory, plan.dtype)
                model = Model(config, regions, loaded, state, prepared=True)
        runner = Runner(model, device)
        warmer = Warmer(runner, plan.table, status, timeline, options.compute.strict)
        status.expect(plan.buckets, plan.device, plan.dtype)
        backend = AotBackend(entries, artifacts.input_specs, model, packages)
        warmer.warm(now, backend)
    with timeline.phase("self_test"):
        self_test(runner, plan.table.buckets[0])
    cold = plan.table.buckets[len(now) :]
    return StartedModel(found.checkpoint, plan, model, runner, warmer, artifacts, cold, found.weights.result)


def _cpu_library(library: "VerifiedFile | None") -> int | None:
    """The handle of the CPU library, where the set has it and this machine can open it."""
    if library is None:
        return None
    try:
        return open_cpu_library(library)
    except AotiError as error:
        _logger.warning("packages run on libtorch", extra={"fields": {"reason": str(error)}})
        return None


def _open_packages(
    packages: "Mapping[str, VerifiedFile]",
    device: str,
    standalone: bool,
    pool: ThreadPoolExecutor,
    timeline: Timeline,
) -> "Mapping[str, Future[Container]]":
    """By entry, what is being opened for every caption: the smallest buckets first, as they are run."""
    began = timeline.now()
    entries = [entry for entry in packages if entry != CPU_LIBRARY and region_of(entry)[0] not in ON_DEMAND]
    opening = {
        entry: pool.submit(Container.open, packages[entry], device, standalone)
        for entry in sorted(entries, key=lambda entry: region_of(entry)[1])
    }

    def note() -> None:
        with timeline.phase("load_artifacts", began):
            wait(opening.values())

    pool.submit(note)  # taken when all others have been
    return opening


def _open_device(
    library: int,
    plan: Plan,
    lone_threads: int,
    standalone: bool,
    opening: "Mapping[str, Future[Container]]",
    beside: ExitStack,
) -> "tuple[Device[NativeTensor], NativeMemory | NativeCudaMemory, NativePackages]":
    """Opens the plan's device on this thread. Returns the device, its memory, and the packages that open for it.

    Args:
        library: the handle of libtorch, or of the CPU library if the start is ``standalone``.
        lone_threads: threads of an operation on a CPU for a single row.
        beside: the scope whose end waits for all that loads in the background.
    """
    from snapcap.warmup.runtime.aoti.libtorch import Libtorch  # noqa: PLC0415
    from snapcap.warmup.runtime.aoti.native_packages import NativePackages  # noqa: PLC0415

    if plan.device_type == "cpu":
        from snapcap.warmup.runtime.aoti.native_tensors import NativeMemory  # noqa: PLC0415
        from snapcap.warmup.runtime.devices.cpu import CpuDevice  # noqa: PLC0415

        libtorch = Libtorch(library)
        libtorch.set_num_threads(plan.threads)
        host = NativeMemory(libtorch)
        packages = NativePackages(libtorch, "cpu", None, opening, standalone, plan.threads, lone_threads)
        return CpuDevice(host), host, packages
    from snapcap.warmup.runtime.aoti.cublas import loading_cublas  # noqa: PLC0415
    from snapcap.warmup.runtime.aoti.cuda_runtime import CudaRuntime  # noqa: PLC0415
    from snapcap.warmup.runtime.aoti.native_cuda import NativeCudaDevice  # noqa: PLC0415

    index = int(plan.device.partition(":")[2] or 0)
    cuda, libtorch = CudaRuntime(library, index), Libtorch(library, index)
    beside.enter_context(loading_cublas(library, libtorch, cuda, plan.dtype))
    device = NativeCudaDevice(libtorch, cuda)
    return device, device.memory, NativePackages(libtorch, plan.device, cuda.stream, opening)
