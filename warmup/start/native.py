"""Loads a compiled model without torch's Python module, whose import would take longer than the rest of a start.

Such a start needs the packages of an artifact set, and prepared weights.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from snapcap.models.dimensions import ON_DEMAND
from snapcap.models.regions.table import build_regions
from snapcap.models.weights.prepared import MappedWeights
from snapcap.warmup.artifacts.fetch import Artifacts
from snapcap.warmup.artifacts.manifest import CPU_LIBRARY, LIBRARIES
from snapcap.warmup.machine.capacity import available_cpus, whole_cpus
from snapcap.warmup.machine.torch_libraries import load_torch_libraries
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.aoti.native import Libtorch, NativeMemory, NativePackages, NativeTensor
from snapcap.warmup.runtime.aoti.packages import AotiError, Container, Containers, open_cpu_library, region_of
from snapcap.warmup.runtime.devices import CpuDevice, CpuLanes, Device
from snapcap.warmup.runtime.model import AotBackend, Backend, Model, check_weights
from snapcap.warmup.start.warmer import Warmer

if TYPE_CHECKING:
    from snapcap.warmup.runtime.aoti.native_cuda import NativeCudaMemory

_OPENERS = 3, 5  # least and most threads that open packages, which mostly works without the interpreter lock
_logger = logging.getLogger("snapcap.start")


class NativeLoader:
    """Implements `Loader` with libtorch's handles. Nothing runs eager: a package that fails ends the start."""

    jit = None
    eager = None

    def __init__(self, plan: Plan, artifacts: Artifacts, options: StartOptions, timeline: Timeline) -> None:
        self._plan = plan
        self._artifacts = artifacts
        self._entries = artifacts.fetched.entries
        self._options = options
        self._timeline = timeline
        self._scope = ExitStack()
        self._memory: NativeMemory | NativeCudaMemory
        self._beside = ExitStack()  # threads that load libraries; closed when the weights are loaded

    def __enter__(self) -> None:
        """Loads the libraries that packages run on, and begins to open the packages on threads. Raises AotiError if
        torch's libraries cannot be loaded."""
        library = self._cpu_library()
        self._standalone = library is not None
        if library is None:
            with self._timeline.phase("load_libraries"):
                library = load_torch_libraries()
        if library is None:
            raise AotiError("torch's libraries cannot be loaded")
        self._library = library
        # Packages are opened on other threads, while opened packages run.
        least, most = _OPENERS
        openers = max(least, min(available_cpus() // 2, most))
        pool = ThreadPoolExecutor(openers, thread_name_prefix="snapcap-packages")
        self._scope.enter_context(pool)
        self._containers = Containers(self._plan.device, self._standalone, self._open_packages(pool))

    def _cpu_library(self) -> int | None:
        """Returns the handle of the CPU library; None if the set lacks it or this machine cannot open it."""
        library = self._entries.get(CPU_LIBRARY)
        if library is None:
            return None
        try:
            with self._timeline.phase("load_cpu_library"):
                return open_cpu_library(library)
        except AotiError as error:
            _logger.warning("packages run on libtorch", extra={"fields": {"reason": str(error)}})
            return None

    def __exit__(self, *error: Any) -> None:
        self._beside.__exit__(*error)
        self._scope.__exit__(*error)

    def _open_packages(self, pool: ThreadPoolExecutor) -> dict[str, Future[Container]]:
        """Begins to open the packages that READY waits for, the smallest buckets first, and returns their futures
        by entry."""
        began = self._timeline.now()
        packages, device, standalone = self._entries, self._plan.device, self._standalone
        of = {entry: region_of(entry) for entry in packages if entry not in LIBRARIES}
        opening = {
            entry: pool.submit(Container.open, packages[entry], device, standalone)
            for entry, (region, size) in sorted(of.items(), key=lambda each: each[1][1])
            if region not in ON_DEMAND and size in self._plan.buckets
        }

        def note() -> None:
            with self._timeline.phase("load_artifacts", began):
                wait(opening.values())

        pool.submit(note)  # runs after the last package was taken
        return opening

    def open_device(self) -> Device[NativeTensor]:
        plan, library, standalone = self._plan, self._library, self._standalone
        if plan.device_type == "cpu":
            libtorch = Libtorch(library)
            self._memory = host = NativeMemory(libtorch)
            self._packages = NativePackages(libtorch, threads=plan.threads)
            # libtorch keeps the number of threads for each calling thread.
            if not standalone or plan.threads >= max(available_cpus(), 2):
                libtorch.set_num_threads(plan.threads)
                return CpuDevice(host)
            alone = self._options.compute.threads or whole_cpus()
            lanes = CpuLanes(libtorch.set_num_threads, plan.threads, alone)
            lanes.serve(alone=True)
            return CpuDevice(host, lanes)
        from snapcap.warmup.runtime.aoti.native_cuda import (  # noqa: PLC0415  only a GPU needs it
            CudaRuntime,
            NativeCudaDevice,
            loading_cublas,
        )

        cuda, libtorch = CudaRuntime(library, plan.device_index), Libtorch(library, plan.device_index)
        self._beside.enter_context(loading_cublas(library, libtorch, cuda, plan.dtype))
        device = NativeCudaDevice(libtorch, cuda)
        self._memory = device.memory
        self._packages = NativePackages(libtorch, cuda.stream)
        return device

    def load_model(
        self, checkpoint: Checkpoint, mapped: MappedWeights | None
    ) -> tuple[Checkpoint, Model[NativeTensor]]:
        """Raises ValueError if the weights have other regions or layers than the configuration implies."""
        if mapped is None:
            raise TypeError("a start without torch, and without prepared weights")
        plan, config, memory = self._plan, checkpoint.config, self._memory
        with self._beside:
            regions = build_regions(config)
            check_weights(mapped, regions)
            weights = memory.weights(mapped)
            state = plan.decode_state(config, memory)
            return checkpoint, Model(config, regions, weights, state, prepared=True)

    def open_packages(self, warmer: Warmer, model: Model[NativeTensor], artifacts: Artifacts | None) -> Backend:
        specs, packages = self._artifacts.input_specs, self._packages
        return AotBackend(self._entries, specs, model, self._containers, packages.function_of, packages.eager)
