"""Warms a runner: assigns every bucket to a backend, and runs each bucket once with the callables that serve."""

import logging
import time
from typing import Any

import numpy as np

from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import VisionConfig
from snapcap.models.processing.packed import SIDE, examples
from snapcap.warmup.errors import StartError, first_line
from snapcap.warmup.plan.plan import Bucket, BucketTable
from snapcap.warmup.progress.status import COMPONENTS, BucketState, ComponentName, StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.runtime.aoti.packages import InputSpecError, PackageError
from snapcap.warmup.runtime.devices import Pixels
from snapcap.warmup.runtime.model import AotBackend, Backend
from snapcap.warmup.runtime.runner import Runner, open_callables
from snapcap.warmup.runtime.slot_request import SlotRequest

SELF_TEST_TOKENS = 8
# The longest run of a bucket before READY, in seconds of the device thread, if the run only computes: on a CPU, a
# first run takes as long as a later one, and a large model's run of many images takes seconds.
LONGEST_RUN_S = 0.25
_logger = logging.getLogger("snapcap.start")


@dataclass(frozen=True)
class Warmer:
    """Assigns buckets to a backend, and runs each once with the callables that serve. Device thread only.

    ``table``: the buckets of encodes; a bucket that it lacks runs decode steps alone. ``eager``: the backend of
    buckets whose compiled code fails; None: such a failure is an error. ``tested``: this server has started the
    model with the same packages before. On a GPU, the launches of all buckets but the first are then recorded
    without a run, because a run of many images would delay other models on the same GPU."""

    runner: Runner[Any]
    table: BucketTable
    status: StartupStatus
    timeline: Timeline
    strict: bool = False
    eager: Backend | None = None
    tested: bool = False

    def components(self, bucket: Bucket) -> tuple[ComponentName, ...]:
        """Returns the components that have a bucket."""
        return COMPONENTS if bucket in self.table.buckets else ("decoder",)

    def assign(self, backend: Backend, buckets: tuple[Bucket, ...]) -> None:
        """Assign buckets without a backend to this one. A bucket whose packages cannot be opened stays eager, or
        ends a strict start. With jit every bucket can be opened, because jit compiles at the first run. Raises
        StartError if a bucket cannot be opened, and the start is strict, and PackageError or InputSpecError if a
        bucket cannot be opened, and there is no eager backend."""
        for bucket in buckets:
            for component in self.components(bucket):
                self._assign_one(component, bucket, backend)

    def _assign_one(self, component: ComponentName, bucket: Bucket, backend: Backend) -> None:
        if self.runner.is_bound(component, bucket):
            return
        try:
            self._bind(component, bucket, backend)
        except (PackageError, InputSpecError) as error:
            self._stay_eager(component, bucket, backend.name, error)

    def _bind(
        self, component: ComponentName, bucket: Bucket, backend: Backend, state: BucketState = "pending"
    ) -> None:
        self.runner.bind(component, bucket, open_callables(self.runner.regions, component, bucket, backend))
        self.status.update(component, bucket.size, state, backend.name)

    def _stay_eager(self, component: ComponentName, bucket: Bucket, backend: str, error: Exception) -> None:
        reason = first_line(error)
        if self.eager is None:
            raise error
        if self.strict:
            raise StartError(f"the {backend} backend cannot serve: {reason}") from error
        fields = {"component": component, "bucket": bucket.size, "error": reason}
        _logger.error("bucket stays eager", extra={"fields": fields})
        self._bind(component, bucket, self.eager, "failed")

    def warm(self, buckets: tuple[Bucket, ...], backend: Backend) -> None:
        """Run each bucket once, the smallest first, because the first request usually comes alone. No row may be
        running.

        On a CPU, a bucket is only loaded if its run would take longer than `LONGEST_RUN_S`, extrapolated from the
        bucket before it. On a GPU, a tested model's buckets behind the first are only loaded.

        Each bucket without a backend is assigned to ``backend`` just before the bucket runs, while other threads
        open the packages of later buckets. Before launches are recorded, all other buckets of encodes are assigned
        too, so that no package is opened during the recording. Raises the errors of ``assign``."""
        for component in COMPONENTS:
            with self.timeline.phase(f"warm_{component}"):
                seconds_a_row = 0.0
                for bucket in (each for each in buckets if component in self.components(each)):
                    self._assign_one(component, bucket, backend)
                    known = self._records_untried and bucket != buckets[0]
                    if known or (
                        seconds_a_row * bucket.size > LONGEST_RUN_S and self._only_computes(component, bucket)
                    ):
                        self._note(component, bucket, "loaded")
                    else:
                        began = time.thread_time()  # does not count time in which other processes have the CPU
                        self._run_once(component, bucket)
                        seconds_a_row = (time.thread_time() - began) / bucket.size
        self.assign(backend, self.table.buckets)
        if self.runner.device.runs_ahead:
            with self.timeline.phase("capture_graphs"):
                for bucket in reversed(buckets):
                    self._capture(bucket)

    def _only_computes(self, component: ComponentName, bucket: Bucket) -> bool:
        """Returns whether a first run only computes, as later ones do: jit compiles, and CUDA loads kernels."""
        backend = self.status.bucket(component, bucket.size).backend
        return not self.runner.device.runs_ahead and backend in ("aot", "eager")

    @property
    def _records_untried(self) -> bool:
        """Returns whether launches are recorded that have not run in this process."""
        return self.tested and self.runner.device.runs_ahead

    def prepare(self, bucket: Bucket, backend: Backend) -> None:
        """Open the packages that ``warm_aside`` needs. Any thread may call it."""
        for component in self.components(bucket):
            if isinstance(backend, AotBackend) and not self.runner.is_bound(component, bucket):
                backend.prepare(component, bucket)

    def warm_aside(self, bucket: Bucket, backend: Backend) -> None:
        """Make a bucket ready while rows are running. A bucket without a backend is assigned to this one. Raises
        the backend's errors: no bucket is needed so much that it should run eager instead."""
        for component in self.components(bucket):
            started = self.timeline.now()
            if not self.runner.is_bound(component, bucket):
                self._bind(component, bucket, backend)
            if not self._records_untried:
                self.runner.run_aside(component, bucket)
                self.runner.device.wait()
            self._note(component, bucket, "warm", self.timeline.now() - started, started)
        if self.runner.device.runs_ahead:
            self._capture(bucket)

    def _capture(self, bucket: Bucket) -> None:
        for component in self.components(bucket):
            self.runner.capture(component, bucket)
            self._note(component, bucket, "captured")

    def _run_once(self, component: ComponentName, bucket: Bucket) -> None:
        """Run a bucket with its callables. If that fails, as when jit cannot compile it, run the bucket eager."""
        started = self.timeline.now()
        backend = self.status.bucket(component, bucket.size).backend
        try:
            self._call(component, bucket)
        except Exception as error:
            if backend == "eager":
                raise
            self._stay_eager(component, bucket, backend, error)
            self._call(component, bucket)
        self._note(component, bucket, "warm", self.timeline.now() - started, started)

    def _call(self, component: ComponentName, bucket: Bucket) -> None:
        runner = self.runner
        if self.status.bucket(component, bucket.size).backend == "aot":
            runner.run_first_layers(component, bucket)  # the self-test runs all layers
        elif component == "encoder":  # called for each number of tokens, because jit compiles for each
            vision = runner.config.vision
            for picture in examples(vision.image_size, vision.token_buckets):
                runner.encode(bucket, [picture] * bucket.size, 0)
        else:
            runner.admit(0, [SlotRequest()] * bucket.size)
            runner.decode_step(bucket)
        runner.device.wait()

    def _note(
        self,
        component: ComponentName,
        bucket: Bucket,
        state: BucketState,
        seconds: float | None = None,
        start: float | None = None,
    ) -> None:
        """Records the state of a bucket. A failed bucket stays failed; a bucket that only runs eager is "eager"."""
        known = self.status.bucket(component, bucket.size)
        if known.state == "failed":
            state = "failed"
        elif known.backend == "eager" and state != "captured":
            state = "eager"
        self.status.update(component, bucket.size, state, known.backend, seconds, start)


def self_test(runner: Runner[Any], bucket: Bucket) -> tuple[list[int], float]:
    """Captions a built-in image, from pixels to tokens, like a request. Returns up to `SELF_TEST_TOKENS` tokens, or
    two if the test takes longer than `LONGEST_RUN_S`, and this thread's CPU seconds. Raises StartError if the
    logits are not finite: the weights or the device are damaged."""
    config, row = runner.config, SlotRequest()
    began = time.thread_time()
    if config.decoder.reads_prompt:  # the start token comes twice; the encode reads the first
        row = SlotRequest((config.generation.start_id,), prefilled=1)
    runner.encode(bucket, [built_in_image(config.vision)], 0, [row])
    runner.admit(0, [row])
    tokens, seconds = list[int](), 0.0
    while len(tokens) < min(SELF_TEST_TOKENS, runner.state.cache_length - 1):
        # Computed on the host, because a GPU would load four kernels for it.
        if not np.isfinite(runner.device.read(runner.decode_step(bucket))[0]).all():
            raise StartError("the self-test's logits are not finite: the weights or the device are damaged")
        tokens += runner.tokens(1)
        seconds = time.thread_time() - began
        if tokens[-1] in config.generation.eos_ids or (len(tokens) > 1 and seconds > LONGEST_RUN_S):
            break
    return tokens, seconds


def built_in_image(vision: VisionConfig) -> Pixels:
    """Returns pixels [height, width, 3] uint8: a bright disc on a gradient; in a packed picture, one a token."""
    if vision.token_buckets:
        tokens = vision.token_buckets[0]
        (picture,) = examples(vision.image_size, (tokens,))
        picture[:tokens] = _disc((SIDE, SIDE)).reshape(1, -1, 3)
        return picture
    return _disc(vision.image_size)


def _disc(size: tuple[int, int]) -> Pixels:
    height, width = size
    y, x = np.ogrid[0:height, 0:width]
    picture = np.full((height, width, 3), 128, np.uint8)
    picture[..., 0], picture[..., 1] = x * 255 // width, y * 255 // height
    disc = (y - height / 2) ** 2 + (x - width / 2) ** 2 < (min(size) / 4) ** 2
    picture[disc] = (250, 220, 40)
    return picture
