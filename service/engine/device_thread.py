"""Runs the device thread, from its first import of torch to its last decode step."""

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import MAX_BEAMS
from snapcap.service.engine.engine import Engine
from snapcap.service.engine.request import Limits
from snapcap.service.engine.scheduler import Scheduler
from snapcap.service.readiness import BackgroundWork
from snapcap.service.telemetry.work import Work
from snapcap.warmup.errors import first_line
from snapcap.warmup.options import StartOptions
from snapcap.warmup.plan.plan import Bucket
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline
from snapcap.warmup.start.preparation import NO_CALLBACKS, Callbacks
from snapcap.warmup.start.start import StartedModel, load

if TYPE_CHECKING:
    from snapcap.warmup.weights.published import ModelFetcher

# Seconds to wait, when the engine ends, for the package that is being opened: an interpreter that is finalized
# while a thread runs native code can crash.
_WARMING_ENDS_S = 5.0
_LOOK_S = 0.01
_logger = logging.getLogger("snapcap.start")


@dataclass(eq=False)
class DeviceThread:
    """Loads a model and serves it until it is stopped.

    The thread is a daemon, so that a device that hangs cannot keep the process from exiting.

    ``on_ready`` and ``on_failure`` are called on the device thread: ``on_ready`` before the first request is
    served, ``on_failure`` when the start has failed or the device has been given up.

    ``rehearse``, if given, is called before ``on_ready``, on a thread of its own, with an engine over the model
    whose steps are not counted in metrics. An exception that it raises is logged.

    ``observe`` gets the work of the engine that serves. ``turn_ended`` is called after each turn of an engine, the
    engine of the rehearsal included. ``fetcher`` and ``callbacks`` are passed to ``load``."""

    options: StartOptions
    timeline: Timeline
    status: StartupStatus
    observe: Callable[[Work], object]
    on_ready: Callable[[StartedModel, Engine], None]
    on_failure: Callable[[Exception], None]
    rehearse: Callable[[Engine, StartedModel], None] | None = None
    turn_ended: Callable[[], object] = lambda: None
    fetcher: "ModelFetcher | None" = None
    callbacks: Callbacks = NO_CALLBACKS

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, patience: float | None = None) -> None:
        """Waits up to ``patience`` seconds for the thread's end. Returns at once on the device thread itself, which
        may be the one that drops the last reference."""
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)

    def _run(self) -> None:
        try:
            loaded = load(self.options, self.timeline, self.status, self.fetcher, self.callbacks)
            if self.rehearse is not None:
                with self.timeline.phase("rehearsal"):
                    self._run_rehearsal(loaded, self.rehearse)
            scheduler = self._scheduler(loaded, cold=[bucket.size for bucket in loaded.cold])
            engine = Engine(scheduler, self.observe, self.turn_ended)
            self.on_ready(loaded, engine)
            with ExitStack() as behind:
                if loaded.cold:
                    warming = BackgroundWork(partial(self._warm_cold, engine, loaded, scheduler))
                    behind.callback(warming.end, _WARMING_ENDS_S)
                engine.run(loaded.runner, self.status.decoder_backend)
        except Exception as error:
            self.on_failure(error)

    def _scheduler(self, loaded: StartedModel, cold: Iterable[int] = ()) -> Scheduler:
        bounds = limits(loaded, self.options)
        return Scheduler(loaded.warm_table, bounds, cold=cold, steps_alone=loaded.plan.step_buckets)

    def _run_rehearsal(self, loaded: StartedModel, rehearse: Callable[[Engine, StartedModel], None]) -> None:
        scheduler = self._scheduler(loaded)
        engine = Engine(scheduler, turn_ended=self.turn_ended)

        def beside() -> None:
            try:
                rehearse(engine, loaded)
            except Exception:
                _logger.exception("the rehearsal of a request failed")
            finally:
                engine.stop()

        threading.Thread(target=beside, name="rehearsal", daemon=True).start()
        engine.run(loaded.runner, self.status.decoder_backend)

    def _warm_cold(self, engine: Engine, loaded: StartedModel, scheduler: Scheduler, work: BackgroundWork) -> None:
        """Makes the cold buckets ready, the smallest first. Running rows wait only while a bucket runs, on the
        device thread between two steps. Packages are opened on the calling thread."""
        for bucket in loaded.cold:
            if work.ended.is_set() or engine.is_stopping:
                return
            try:
                loaded.warmer.prepare(bucket, loaded.backend)
            except Exception as error:
                # On the device thread, which sends the errors of requests at the end of its turn.
                engine.call(partial(self._give_up, loaded, scheduler, bucket, error))
                continue
            warm = partial(self._warm, loaded, scheduler, bucket)
            warmed = engine.call(warm, f"make bucket {bucket.size} ready")
            while not warmed.done():  # an engine that has ended makes no further call
                if work.ended.wait(_LOOK_S):
                    return

    def _warm(self, loaded: StartedModel, scheduler: Scheduler, bucket: Bucket) -> None:
        """Makes one more bucket ready, for batches that it fits better. If that fails, other buckets run them."""
        try:
            loaded.warmer.warm_aside(bucket, loaded.backend)
        except Exception as error:
            self._give_up(loaded, scheduler, bucket, error)
            raise  # the engine checks whether the device is lost
        scheduler.warmed(bucket.size)

    def _give_up(self, loaded: StartedModel, scheduler: Scheduler, bucket: Bucket, error: Exception) -> None:
        for component in loaded.warmer.components(bucket):
            backend = self.status.bucket(component, bucket.size).backend
            self.status.update(component, bucket.size, "failed", backend)
        fields = {"bucket": bucket.size, "error": first_line(error)}
        _logger.error("bucket cannot be made ready", exc_info=error, extra={"fields": fields})
        scheduler.give_up(bucket.size)


def limits(loaded: StartedModel, options: StartOptions) -> Limits:
    """Returns the limits that the loaded model's caches set, and the model's defaults."""
    config = loaded.checkpoint.config
    generation, decoder = config.generation, config.decoder
    return Limits(
        cache_length=loaded.runner.state.cache_length,
        # transformers' max_length counts the start token
        default_new_tokens=options.model.max_new_tokens or max(generation.max_length - 1, 1),
        eos_ids=frozenset(generation.eos_ids),
        max_beams=min(MAX_BEAMS, loaded.plan.slots),
        forced_end=generation.forced_eos_id in generation.eos_ids,
        default_counts_prompt=generation.counts_prompt and not options.model.max_new_tokens,
        prompt_read=decoder.text_tokens if decoder.reads_prompt else 0,
    )
