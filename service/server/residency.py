"""Wakes the models of a server when a request names them, and ends those that are idle, on the event loop.

    absent ── request, or preload ──▶ waking ── ready ──▶ ready ── idle, or failed ──▶ leaving ──▶ absent
                                        └─────────── cannot wake ───────────────────────┘

A model leaves when it had no request for its idle time, which is the server's or that of its last `keep_alive`.
Each start of a model runs like the start of a server of one model, with processes of its own (`EngineClient`). The
processes end when the model leaves, which frees all memory of the model. A model with a request does not leave.
Requests wait for a model that is waking, or leaving, within their time limit. Each model has its own queue, decode
processes and metrics. The memory for decoding images is divided equally between the models.

With a limit of memory, a model that wakes waits until the other models leave room: idle models leave, the least
recently used first, and only as many as the wake needs. A model that has just become ready is idle only if no
client returns at once. Before its first wake a model is expected to take what its configuration and files say. If
no model is idle for a while, the model that has been awake the longest takes no further request and leaves after
the requests that it has. Wakes wait for room in the order in which they came, and a model that has become ready has
served the requests that waited for it before it leaves: two models that do not fit together take turns.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import UserError
from snapcap.models.fields import json_or_empty
from snapcap.service.captioning.captioner import Captioner, Start, WeightFiles
from snapcap.service.config.models import preloaded
from snapcap.service.config.settings import Settings
from snapcap.service.engine.remote.client import RemoteEngine
from snapcap.service.errors import ModelNotAwake
from snapcap.service.images.decode import decode_processes
from snapcap.service.images.pool import ProcessImageDecoder
from snapcap.service.images.processes import own_bytes
from snapcap.service.ipc.fork import settle
from snapcap.service.memory import decode_memory
from snapcap.service.readiness import AFTER_READY_S, Readiness, State
from snapcap.service.server.monitor import EngineClient
from snapcap.service.server.processes import ForkedEngine, ServerProcesses, spawn_engine, spawn_processes
from snapcap.service.server.start_result import attach, weights_on_disk
from snapcap.service.telemetry.metrics import Metrics
from snapcap.service.telemetry.start_metrics import ModelsCollector, StartupCollector
from snapcap.warmup.checkpoints.source import folder_at_hand
from snapcap.warmup.errors import StartError, one_line, unexpected
from snapcap.warmup.machine.capacity import multiplies_bfloat16
from snapcap.warmup.machine.installation import torch_version
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline

if TYPE_CHECKING:
    from snapcap.service.api.app import Services
    from snapcap.warmup.plan.checkpoint import Checkpoint

# Seconds after a failed wake in which requests are refused at once: doubled with each failure in a row.
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_DOUBLINGS = 6  # more would exceed the longest pause, and a float after a day of failures
# Seconds that a model waits for another one to be idle, before one that is in use leaves for it. For as long, a
# model that has become ready stays for clients that return at once: otherwise two models that do not fit together,
# each with a client that sends one image after the other, would wake for every image.
_TURN_S = 2.0
_RETURNS_S = 0.1  # seconds in which such a client returns
_MOMENT_S = 0.02  # between two looks for an end of requests
_LOOK_S = 1.0  # between two looks whether a model is still busy without a request
# Bytes of memory, without files, of an engine process with compiled code, whose weights are a file; of one with
# torch's module, beside its weights; and of a decode process, or the parent of these. Measured on a CPU.
_COMPILED_BYTES = 30 << 20
_TORCH_BYTES = 160 << 20
_DECODE_BYTES = 15 << 20
_PREPARE = "run `snapcap build` with the same options, and with --weights for a model in S3 or on the hub"
_WAKE_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_logger = logging.getLogger("snapcap.models")


class ModelState(StrEnum):
    ABSENT = "absent"
    WAKING = "waking"
    READY = "ready"
    LEAVING = "leaving"


class Memory(NamedTuple):
    """Holds bytes of memory that a model takes while it is awake."""

    device: int = 0
    host: int = 0


class Known(NamedTuple):
    """Describes a model that has never been awake, by its files on this machine: its weights, and the least and the
    most memory that it will take."""

    files: WeightFiles = WeightFiles()
    least: Memory = Memory()
    most: Memory = Memory()


def known(settings: Settings) -> Known:
    """Returns what is known of a model before its first wake. Raises StartError if it can never wake."""
    folder = folder_at_hand(settings.model.source, settings.model.cache_dir, settings.s3)
    if folder is None:
        return Known()
    files, device = weights_on_disk(folder), (0, 0)
    if settings.residency.device_memory:
        from snapcap.warmup.plan.memory import device_need  # noqa: PLC0415 - imports numpy

        with suppress(UserError, OSError, ValueError):  # the wake reports the error
            device = device_need(settings, folder)
    decoding = _DECODE_BYTES * (decode_processes(settings.image_processes.count) + 1)
    host = _TORCH_BYTES + files.size * (2 if _doubles(settings, folder) else 1) + decoding
    found = Known(files, Memory(device[0], _COMPILED_BYTES), Memory(device[1], host))
    if excess := excess_of(settings, [found.least]):
        less = "; --step-buckets none takes less device memory" if "--device-memory" in excess else ""
        raise StartError(f"the model {settings.http.model_name!r} needs more memory than there is: {excess}{less}")
    return found


def _doubles(settings: Settings, folder: Path) -> bool:
    """Returns whether a start with torch's module on a CPU converts weights of 16 bits to float32. Does not ask the
    driver of a GPU."""
    device, dtype = settings.compute.device, settings.compute.dtype
    with suppress(UserError, OSError, ValueError):  # the wake reports the error
        config = json_or_empty(folder / "config.json")
        stored = config.get("dtype") or config.get("torch_dtype")
        on_cpu = device == "cpu" or (device == "auto" and torch_version().cuda is None)
        if on_cpu and stored in ("bfloat16", "float16"):
            keeps = stored == "bfloat16" and multiplies_bfloat16() if dtype == "auto" else dtype.endswith("float16")
            return not keeps
    return False


def excess_of(settings: Settings, models: Sequence[Memory]) -> str:
    """Returns which limits models exceed together, in words; "" if none."""
    residency = settings.residency
    limits = (
        ("--device-memory", residency.device_memory, sum(each.device for each in models)),
        ("--host-memory", residency.host_memory, sum(each.host for each in models)),
    )
    return ", ".join(
        f"{needed >> 20} MiB of {most >> 20} MiB ({flag})"
        for flag, most, needed in limits
        if most and needed > most
    )


def reside(
    models: Mapping[str, Settings],
    before: Mapping[str, Known],
    parts: ServerProcesses | None,
    spare: ForkedEngine | None,
    settings: Settings,
    services: "Services",
    stop: Callable[[], None],
) -> Callable[[], object]:
    """Offers the models; called on the event loop. Returns a function that ends their processes, to call when the
    server has ended.

    `before`: what is `known` of each model. `parts` are the forked processes of the first model that must be ready
    before READY; `spare` is an engine process that waits for its settings. If a model cannot be ready before READY,
    reports the reason and calls ``stop``."""
    residency = Residency(models, spare, settings, services, stop, asyncio.get_running_loop())
    for name, resident in residency.residents.items():
        resident.captioner.files, resident.memory = before[name].files, before[name].most
    residency.begin(parts)
    return residency.close


@dataclass(eq=False)
class Resident:
    """Wakes and ends one model, as the `Keeper` of its captioner. An `EngineClient` reports each start here, as it
    reports the start of a server of one model to `StartResult`. `services` has the model's captioner and metrics,
    whose instruments are in `registry`."""

    name: str
    settings: Settings
    services: "Services"
    registry: CollectorRegistry
    owner: "Residency"

    def __post_init__(self) -> None:
        self.captioner = self.services.captioner
        self.state = ModelState.ABSENT
        self.created = time.time()
        self.registries = [self.registry]  # with the registry of the present start
        self._loop = self.owner.loop
        self._client: EngineClient | None = None
        self._woken: asyncio.Future[str] = self._loop.create_future()  # the reason why it cannot wake, or ""
        self._waiting: asyncio.Task[None] | None = None  # waits for room
        self._leaving: asyncio.Task[None] | None = None
        self._reason = ""  # why the last wake failed
        self.memory = Memory()  # memory of now or of when the model was last awake, or what it is expected to take
        self._idle_s = self.settings.residency.idle_unload or math.inf
        self._keep_s = self._idle_s
        self._timer: asyncio.TimerHandle | None = None
        self.captioner.uses.on_idle = self.look
        self.ready_at = 0.0
        self._asked = 0.0  # when the present wake was asked for
        self._failures = 0  # wakes that failed in a row
        self._may_wake = 0.0  # moment until which requests are refused after a failed wake
        self.start = self._new_start(time.monotonic())

    async def wake(self) -> None:
        """Returns once the model is ready. Wakes the model if it is absent. Raises ModelNotAwake."""
        asked = time.monotonic()
        while self.state is not ModelState.READY:
            self.check()
            if self.state is ModelState.WAKING:
                if reason := await asyncio.shield(self._woken):
                    raise ModelNotAwake(self.name, reason, self._pause)
            elif self._leaving is not None:
                await asyncio.shield(self._leaving)
            else:
                # A task of its own, so that the model keeps its turn if the request's client leaves.
                self._waiting = self._waiting or self._loop.create_task(self._begin_in_turn(asked))
                await asyncio.shield(self._waiting)

    def check(self) -> None:
        """Raises ModelNotAwake while requests are refused because the last wake failed."""
        if self.state in (ModelState.ABSENT, ModelState.LEAVING) and self._pause > 0:
            raise ModelNotAwake(self.name, self._reason, self._pause)

    async def _begin_in_turn(self, asked: float) -> None:
        """Begins to wake once the other models leave room. `asked`: the moment of the request."""
        try:
            async with self.owner.turn:
                await self.owner.room_for(self)
                self.begin(asked=asked)
        finally:
            self._waiting = None

    def begin(
        self, parts: ServerProcesses | None = None, start: Start | None = None, asked: float | None = None
    ) -> None:
        """Begins to wake, with processes that are forked already or are started now. `start` has the records of the
        start, if they are there already. `asked`: the moment of the request that wakes the model, if there is
        one."""
        self.state, self._woken = ModelState.WAKING, self._loop.create_future()
        began = time.monotonic() if start is None else start.timeline.origin
        self._asked = began if asked is None else asked
        self.start = start or self._new_start(began)
        registry = CollectorRegistry()
        self.registries[1:] = [registry]
        readiness, timeline, status = self.start
        name = self.name
        registry.register(StartupCollector(timeline, status, readiness, lambda: name, of_server=False))
        services = replace(self.services, readiness=readiness, registry=registry, timeline=timeline, status=status)
        _logger.info("model waking", extra={"fields": {"model": self.name}})
        try:
            parts = parts or spawn_processes(self.settings, began, self.owner.take_spare())
        except OSError as error:
            self._fail(f"its processes cannot be started: {error}", None)
            return
        self._client = EngineClient(parts, self.settings, services, self, self._loop)
        self._client.start()

    def log_phases(self) -> None:
        """Logs each phase at level DEBUG, as a wake is one event of a server."""
        self.start.timeline.listen(
            lambda phase: _logger.debug("phase", extra={"fields": {"model": self.name, "phase": phase.name}})
        )

    def ready(self, engine: RemoteEngine, checkpoint: "Checkpoint", image_decoder: ProcessImageDecoder) -> None:
        """Serves captions from now on, unless the start has failed meanwhile."""
        if self.state is not ModelState.WAKING:
            return
        attach(self.settings, self.services, engine, checkpoint, image_decoder)
        self.measure()
        if excess := excess_of(self.settings, [self.memory]):
            sentence, pause = f"it needs more memory than the server has for models: {excess}", math.inf
            if self.start.status.compiler().modules:  # a build may make what a start without torch needs
                sentence += f"; a start without torch takes less host memory: {_PREPARE}"
                pause = _LONGEST_PAUSE_S
            self._fail(sentence, None, pause=pause)
            return
        timeline, status = self.start.timeline, self.start.status
        self.start.readiness.ready()
        timeline.mark("ready")
        self.state, self._failures, self._reason = ModelState.READY, 0, ""
        self.ready_at = self.captioner.uses.last = time.monotonic()
        seconds = time.monotonic() - timeline.origin
        self.owner.wakes.labels(self.name, "ready").inc()
        self.owner.wake_seconds.labels(self.name).observe(time.monotonic() - self._asked)
        described = status.to_dict()
        self.settings = replace(self.settings, tested=status.state.tested)
        fields = {name: described[name] for name in ("tier", "device", "dtype")}
        _logger.info("model ready", extra={"fields": {"model": self.name, "s": seconds, **fields}})
        self._woken.set_result("")
        self.owner.became_ready(self)
        self.look()

    def failed(self, error: BaseException) -> None:
        """Ends the start, or the model that was ready. May be called from any thread."""
        with suppress(RuntimeError):  # the loop has been closed: the server ends
            self._loop.call_soon_threadsafe(self._fail, one_line(error), unexpected(error))

    def told_failed(self, sentence: str) -> None:
        """Does the same as `failed` with the sentence of another process."""
        self._fail(sentence, None)

    def leave(self, why: str) -> None:
        """Ends the model's processes, after the requests that it has; `why` is a label for metrics. Later requests
        wait."""
        if why != "failed":
            self.measure()
        self.state, self._keep_s = ModelState.LEAVING, self._idle_s
        end_prompts = self.captioner.detach()
        self.owner.leaves.labels(self.name, why).inc()
        _logger.info("model leaving", extra={"fields": {"model": self.name, "why": why}})
        self._leaving = self._loop.create_task(self._leave(end_prompts, at_once=why == "failed"))

    def close(self) -> None:
        """Ends the processes after the event loop has stopped; those of a model that is leaving end by
        themselves."""
        if self._client is not None and self.state is not ModelState.LEAVING:
            self._client.close()
        self.captioner.close()

    @property
    def _pause(self) -> float:
        """Seconds in which requests are still refused after a failed wake."""
        return min(self._may_wake - time.monotonic(), _LONGEST_PAUSE_S)

    def is_in(self, state: ModelState) -> bool:
        return self.state is state

    def keep(self, seconds: float) -> None:
        """Sets the idle time after which the model leaves, until it has left. No effect if the model is absent."""
        if self.state in (ModelState.WAKING, ModelState.READY):
            self._keep_s = seconds
            self.look()

    def look(self) -> None:
        """Has the model leave if its idle time is over, or looks again when it is. Called when a request ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.state is ModelState.READY and self._keep_s < math.inf:
            left = _LOOK_S if self.busy else self.leaves_s
            if left > 0:
                self._timer = self._loop.call_later(left, self.look)
            else:
                self.leave("idle")

    @property
    def busy(self) -> bool:
        """True while the model has a request, or while its artifacts are being built."""
        return self.captioner.uses.count > 0 or self.start.status.is_building

    @property
    def had_its_turn(self) -> bool:
        """True if the model became ready long enough ago to leave for another one."""
        return time.monotonic() > self.ready_at + _TURN_S

    @property
    def can_leave(self) -> bool:
        """True while the model is idle and need not stay for a client that may return at once."""
        return not self.busy and (self.had_its_turn or self.idle_s > _RETURNS_S)

    @property
    def idle_s(self) -> float:
        """Seconds without a request; 0 while the model is busy."""
        return 0.0 if self.busy else time.monotonic() - self.captioner.uses.last

    @property
    def leaves_s(self) -> float:
        """Seconds until the model leaves if it gets no further request."""
        return max(self._keep_s - self.idle_s, 0.0)

    def measure(self) -> None:
        """Notes the memory that the model takes now."""
        if self._client is not None:
            self.memory = Memory(self._client.device_bytes, self.host_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of memory of the model's processes, without the pages of files."""
        return 0 if self._client is None else sum(own_bytes(pid) or 0 for pid in self._client.pids)

    def _fail(self, sentence: str, cause: BaseException | None, pause: float | None = None) -> None:
        """Ends the start, or the model that was ready. `pause`: seconds in which requests are refused at once."""
        before = self.state
        self.settings = replace(self.settings, tested="")  # the next wake has a self-test
        if before not in (ModelState.WAKING, ModelState.READY):
            return
        fields = {"model": self.name, "error": sentence}
        _logger.error("model failed", extra={"fields": fields}, exc_info=cause)
        self.start.status.fail(sentence)
        self.start.readiness.fail(sentence)
        if before is ModelState.WAKING:
            pause = pause or min(_PAUSE_S * 2 ** min(self._failures, _DOUBLINGS), _LONGEST_PAUSE_S)
            self._failures, self._reason, self._may_wake = self._failures + 1, sentence, time.monotonic() + pause
            self.owner.wakes.labels(self.name, "failed").inc()
        self.leave("failed")
        if before is ModelState.WAKING:
            self._woken.set_result(sentence)
            self.owner.cannot_wake(self, sentence)

    async def _leave(self, end_prompts: Callable[[], None], *, at_once: bool) -> None:
        client, uses = self._client, self.captioner.uses
        while uses.count > uses.waiting and not at_once:  # noqa: ASYNC110 - few models leave while they are in use
            await asyncio.sleep(_MOMENT_S)
        end_prompts()
        try:
            if client is not None:
                await client.leave()
        except Exception:
            _logger.exception("the processes of a model have not ended as they should")
        self._client, self._leaving, self.registries[1:] = None, None, []
        self.state = ModelState.ABSENT
        _logger.info("model absent", extra={"fields": {"model": self.name}})
        self.owner.look_at_reserve()

    def _new_start(self, origin: float) -> Start:
        timeline = Timeline(origin)
        return Start(Readiness(lambda: timeline.current() or str(self.state)), timeline, StartupStatus())


@dataclass(eq=False)
class Residency:
    """Holds the models of a server."""

    models: Mapping[str, Settings]
    spare: ForkedEngine | None
    settings: Settings
    services: "Services"
    stop: Callable[[], None]
    loop: asyncio.AbstractEventLoop

    def __post_init__(self) -> None:
        models = self.models
        self._closing = False
        self.turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop keeps no task alive
        registry = self.services.registry
        self.wakes = Counter(
            "snapcap_model_wakes_total", "Starts of a model's processes.", ("model", "result"), registry=registry
        )
        self.wake_seconds = Histogram(
            "snapcap_model_wake_seconds",
            "Seconds from the request that wakes a model until it is ready.",
            ("model",),
            buckets=_WAKE_S,
            registry=registry,
        )
        self.leaves = Counter(
            "snapcap_model_leaves_total",
            "Ends of a model's processes, by reason: idle, memory, failed.",
            ("model", "why"),
            registry=registry,
        )
        self.residents = {
            name: self._resident(name, each, len(models), first=index == 0)
            for index, (name, each) in enumerate(models.items())
        }
        captioners = {name: each.captioner for name, each in self.residents.items()}
        for name, resident in self.residents.items():
            resident.captioner.join(name, resident, captioners)
            for result in ("ready", "failed"):  # Prometheus needs a value before the first event
                self.wakes.labels(name, result)
            for why in ("idle", "memory", "failed"):
                self.leaves.labels(name, why)
        self._expected = {name: self.residents[name] for name in preloaded(self.settings, models)}
        self._observe(registry)
        registry.register(ModelsCollector(self._registries))

    def begin(self, parts: ServerProcesses | None) -> None:
        """Begins to wake the models that must be ready before READY; `parts` are the processes of the first of
        them."""
        if not self._expected:
            self._ready()
        services = self.services
        for resident in list(self._expected.values()):
            start: Start | None = None
            if parts is not None:  # the start of the server is this model's start
                start = Start(Readiness(services.readiness.phase), services.timeline, services.status)
            resident.begin(parts, start)
            parts = None

    def take_spare(self) -> ForkedEngine | None:
        """Returns an engine process that waits for its settings, if there is one, for the next wake."""
        spare, self.spare = self.spare, None
        return spare

    async def room_for(self, resident: Resident) -> None:
        """Waits until the models that are awake leave room for one more; has others leave for it."""
        began, state = time.monotonic(), resident.state
        for each in self.residents.values():
            if each.state is ModelState.READY:  # a model that wakes will take more, one that leaves took more
                each.measure()
        while resident.state is state:
            residents = self.residents.values()
            awake = [each for each in residents if each.state is not ModelState.ABSENT and each is not resident]
            if not awake or not excess_of(self.settings, [each.memory for each in (*awake, resident)]):
                return
            staying = [each for each in awake if each.state is not ModelState.LEAVING]
            # Models that are leaving will free their memory, but may have long requests.
            late = time.monotonic() > began + _TURN_S
            if late or excess_of(self.settings, [each.memory for each in (*staying, resident)]):
                leaves = self._next_to_leave([each for each in awake if each.state is ModelState.READY], late=late)
                if leaves is not None:
                    leaves.leave("memory")
                    began = time.monotonic()
            await asyncio.sleep(_MOMENT_S)

    def _next_to_leave(self, ready: Sequence[Resident], *, late: bool) -> Resident | None:
        """Returns the model that leaves for another one: the idle model that was used the least recently, or, if it
        is late, the model that has been awake the longest. None if each model has to stay for now."""
        if idle := [each for each in ready if each.can_leave]:
            return min(idle, key=lambda each: each.captioner.uses.last)
        longest = min(ready, key=lambda each: each.ready_at, default=None)
        return longest if late and longest is not None and longest.had_its_turn else None

    def became_ready(self, resident: Resident) -> None:
        """Ends the server's start once all models that must be ready are. Has others leave if the model takes more
        than was expected before its first wake."""
        if resident.name in self._expected:
            ready = [each.memory for each in self.residents.values() if each.state is ModelState.READY]
            if excess := excess_of(self.settings, ready):
                self.cannot_wake(resident, f"the models of --preload need more memory than there is: {excess}")
            else:
                del self._expected[resident.name]
                if not self._expected:
                    self._ready()
        making_room = self.loop.create_task(self.room_for(resident))
        self._tasks.add(making_room)
        making_room.add_done_callback(self._tasks.discard)
        self.look_at_reserve()

    def look_at_reserve(self) -> None:
        """Starts an engine process in reserve if a model is absent, so that the next wake waits neither for an
        interpreter nor for modules and libraries."""
        absent = any(each.state is ModelState.ABSENT for each in self.residents.values())
        if absent and self.services.readiness.state is State.READY:
            self.loop.call_later(AFTER_READY_S, self._reserve)

    def cannot_wake(self, resident: Resident, sentence: str) -> None:
        """Ends the server if a model that must be ready before READY cannot be."""
        if resident.name in self._expected:
            readiness = self.services.readiness
            if readiness.state is State.STARTING:
                self.services.status.fail(sentence)
                readiness.fail(f"the model {resident.name!r} cannot start: {sentence}")
            self.stop()

    def close(self) -> None:
        """Ends the processes of all models, after the event loop has stopped."""
        self._closing = True
        threads = [threading.Thread(target=each.close) for each in self.residents.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.spare is not None:
            self.spare.end()

    def _ready(self) -> None:
        services = self.services
        settle()
        if services.readiness.ready():
            services.timeline.mark("ready")
            states = " ".join(f"{name}:{each.state}" for name, each in self.residents.items())
            fields = {"s": services.timeline.marks()["ready"], "models": states}
            _logger.info("ready", extra={"fields": fields})
            self.loop.call_later(AFTER_READY_S, self._prepare_spare)

    def _reserve(self) -> None:
        if self.spare is None and not self._closing:
            try:
                self.spare = spawn_engine()
            except OSError as error:  # the next wake tries again, and reports the error
                _logger.warning("no engine process in reserve", extra={"fields": {"error": str(error)}})
            self._prepare_spare()

    def _prepare_spare(self) -> None:
        if self.spare is not None:
            devices = {each.settings.compute.device for each in self.residents.values()}
            # A model on a CPU shall not get a process that has the driver of a GPU.
            self.spare.reserve(devices.pop() if len(devices) == 1 else "cpu")

    def _resident(self, name: str, settings: Settings, count: int, *, first: bool) -> Resident:
        services = self.services
        share = max(decode_memory(self.settings) // count, 1)
        settings = replace(settings, images=replace(settings.images, decode_memory=share))
        if first:
            return Resident(name, settings, services, services.metrics.of_model, self)
        registry = CollectorRegistry()
        metrics = Metrics(CollectorRegistry(), registry)
        captioner = Captioner(self.settings.queue, services.readiness, metrics, services.timeline)
        return Resident(name, settings, replace(services, captioner=captioner, metrics=metrics), registry, self)

    def _observe(self, registry: CollectorRegistry) -> None:
        """Adds what is known of each model at a scrape to the metrics."""
        state = Gauge("snapcap_model_state", "1 for the state of a model.", ("model", "state"), registry=registry)
        idle = Gauge("snapcap_model_idle_seconds", "Seconds without a request.", ("model",), registry=registry)
        text = "Bytes of memory of a model's processes, without files."
        memory = Gauge("snapcap_model_host_bytes", text, ("model",), registry=registry)
        for name, resident in self.residents.items():
            for each in ModelState:
                state.labels(name, each.value).set_function(partial(resident.is_in, each))
            idle.labels(name).set_function(partial(getattr, resident, "idle_s"))
            memory.labels(name).set_function(partial(getattr, resident, "host_bytes"))

    def _registries(self) -> Iterator[tuple[str, CollectorRegistry]]:
        for name, resident in self.residents.items():
            for registry in list(resident.registries):
                yield name, registry
