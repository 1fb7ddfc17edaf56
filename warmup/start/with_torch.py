"""Loads a model with torch's module, for all starts that need more than packages. This module imports torch."""

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import WeightsError
from snapcap.models.weights.prepared import MappedWeights
from snapcap.warmup.artifacts.fetch import Artifacts
from snapcap.warmup.errors import StartError
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.checkpoint import Checkpoint
from snapcap.warmup.plan.plan import Plan
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.devices import Device
from snapcap.warmup.runtime.model import Backend, EagerBackend, Model
from snapcap.warmup.runtime.torch_model import (
    LoadedModel,
    avoid_driver_compilation,
    load_model,
    open_device,
    torch_device,
)
from snapcap.warmup.start.warmer import Warmer

if TYPE_CHECKING:
    from snapcap.warmup.start.jit import Jit

_logger = logging.getLogger("snapcap.start")


@dataclass(eq=False)
class TorchLoader:
    """Implements `Loader` with torch's tensors. A bucket whose compiled code fails runs eager."""

    plan: Plan
    options: StartOptions
    timeline: Timeline
    status: StartupStatus

    def __post_init__(self) -> None:
        self.jit: Jit | None = None
        self.eager = EagerBackend()
        self._scope = ExitStack()

    def __enter__(self) -> None:
        if self.options.compute.backend == "jit":
            from snapcap.warmup.start.jit import open_compiler  # noqa: PLC0415  no other start needs it

            self.jit = self._scope.enter_context(open_compiler(self.options, self.timeline, self.status))

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*error)

    def open_device(self) -> Device[Tensor]:
        self._device, self._dtype = open_device(self.plan)
        if self.jit is None:
            avoid_driver_compilation()
        return torch_device(self._device)

    def load_model(self, checkpoint: Checkpoint, mapped: MappedWeights | None) -> tuple[Checkpoint, LoadedModel]:
        described = checkpoint.config, checkpoint.transform, self.plan, self._device, self._dtype
        try:
            return checkpoint, load_model(checkpoint.folder, *described, mapped)
        except WeightsError:
            if checkpoint.bring is None:
                raise
            checkpoint = checkpoint.whole()  # the log says why published weights could not be used
            return checkpoint, load_model(checkpoint.folder, *described)

    def open_packages(self, warmer: Warmer, model: Model[Tensor], artifacts: Artifacts | None) -> Backend:
        with self.timeline.phase("load_artifacts"):
            backend = self._backend(model, artifacts) or self.eager
            warmer.assign(backend, self.plan.table.buckets)
        return backend

    def _backend(self, model: Model[Tensor], artifacts: Artifacts | None) -> Backend | None:
        """Returns the backend that runs compiled code, or None if the start stays eager."""
        if artifacts is None or (self.options.compute.backend == "jit" and self.jit is None):
            return None
        if not artifacts.hit:
            _report_missing(artifacts, self.options)
        if self.jit is not None:
            return self.jit.backend(self.plan, artifacts)
        if not artifacts.hit:
            return None
        if not self.plan.runs_on_libtorch:
            self._report_unused()
            return None
        from snapcap.warmup.runtime.aoti.torch_packages import torch_backend  # noqa: PLC0415  only packages need it

        return torch_backend(artifacts.fetched.entries, artifacts.input_specs, model)

    def _report_unused(self) -> None:
        """Logs why the packages are not used. Raises StartError if the start is strict, and for `aot`."""
        reason = "packages of int8 weights run only in a start without torch's module, from prepared weights"
        remedy = f"run `snapcap build --model {self.options.model.source} --dtype int8`; it prepares the weights"
        if self.options.compute.strict and self.options.compute.backend == "aot":
            raise StartError(f"the aot backend cannot start: {reason}; {remedy}")
        fields = {"backend": "eager", "reason": reason, "remedy": remedy}
        _logger.warning("artifacts not used", extra={"fields": fields})


def _report_missing(artifacts: Artifacts, options: StartOptions) -> None:
    """Log what the start does without artifacts: as an error if the backend `aot` was requested, else as a note.
    Raises StartError if the start is strict."""
    fetched = artifacts.fetched
    if options.compute.strict and options.compute.backend == "aot":
        advice = f"; {fetched.remedy}" if fetched.remedy else ""
        raise StartError(f"the aot backend has no artifacts: {fetched.result}: {fetched.reason}{advice}")
    instead = {"compiling": "now"} if options.compute.backend == "jit" else {"backend": "eager"}
    fields = {"result": fetched.result, "reason": fetched.reason, "key": artifacts.key[:12], **instead}
    if options.store.build == "off" and fetched.remedy:
        fields["remedy"] = fetched.remedy
    level = logging.INFO if options.compute.backend != "aot" and fetched.result == "miss" else logging.ERROR
    _logger.log(level, "no artifacts", extra={"fields": fields})
