"""Runs the engine on the device thread: steps the runner, and admits waiting requests between two decode steps.

On a device that works while the host goes on, the next step is launched before the tokens of the last are read.
Results are handed out and images are prepared while the device works on two steps:

    host     launch 1 ─ launch 2 ─ read 1 ─ launch 3 ─ hand out, encode ─ read 2 ─ launch 4 ─ …
    device            [ step 1 ][ step 2 ][ step 3 ][ images ][ step 4 ]

A row that ended with step 1 is in step 2 as well; its result there is discarded.

On CPUs, images that arrive while rows run are encoded on a second thread, beside the steps of these rows:

    device thread    step ─ step ─ step ─ step ─ admit the encoded rows ─ step ─ …
    encode thread    [ images 2 and 3         ]                         [ image 4 …
"""

import logging
import queue
import random
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from snapcap.models.dataclass import dataclass
from snapcap.models.errors import UserError, headline
from snapcap.service.engine.remote.messages import Pulse
from snapcap.service.engine.request import CaptionRequest
from snapcap.service.engine.scheduler import RunningRequest, Scheduler
from snapcap.service.errors import EngineFailed
from snapcap.service.telemetry.work import Batch, Work
from snapcap.warmup.machine.worker import fulfil
from snapcap.warmup.runtime.slot_request import Needs, SlotRequest

if TYPE_CHECKING:
    from snapcap.warmup.runtime.devices import DeviceHealth, PendingTokens, Timer
    from snapcap.warmup.runtime.runner import Runner

# After so many failed turns in a row the fault is lasting, whatever it is: further requests would only fail too.
MAX_CONSECUTIVE_FAILURES = 3
# Seconds without device memory after which the device is given up. Memory that other processes hold may be free
# again a moment later, and a restarted server would get less of it. But a server that has had no memory for so long
# serves nobody, while another server of a fleet can.
OUT_OF_MEMORY_S = 60.0


class DeviceFailedError(UserError):
    """The device cannot be used any more. The message is one line that says why; `__cause__` has the traceback."""


class DeviceFailures:
    """Counts the failed turns since the last turn that succeeded. Only the device thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.count = 0
        self._since = 0.0
        self._memory_only = True

    def none(self) -> None:
        """Resets the count, because a turn succeeded."""
        self.count = 0

    def judge(self, error: Exception, health: "DeviceHealth") -> None:
        """Counts one more failed turn. ``health`` is the state that the device reports after it. Raises
        DeviceFailedError if the device must be given up."""
        self.count += 1
        if self.count == 1:
            self._since, self._memory_only = self._clock(), True
        self._memory_only = self._memory_only and health == "out_of_memory"
        cause = headline(error)
        if health == "lost":
            raise DeviceFailedError(f"the device is lost: {cause}") from error
        if self.count < MAX_CONSECUTIVE_FAILURES:
            return
        seconds = self._clock() - self._since
        if not self._memory_only:
            raise DeviceFailedError(
                f"the device failed {self.count} times in a row, the last with: {cause}"
            ) from error
        if seconds >= OUT_OF_MEMORY_S:
            raise DeviceFailedError(f"the device has been out of memory for {seconds:.0f} s: {cause}") from error


log = logging.getLogger("snapcap.engine")
T = TypeVar("T")


@dataclass(frozen=True)
class _Encoded:
    """Images whose encode was launched on the device."""

    rows: list[RunningRequest]
    bucket: int
    timer: "Timer"


@dataclass(frozen=True)
class _Step:
    """A decode step that was launched on the device, and the encodes launched since the step before."""

    rows: list[RunningRequest]  # by slot: a beam search stands in several slots
    bucket: int
    tokens: "PendingTokens"
    timer: "Timer"
    encoded: list[_Encoded]


@dataclass(frozen=True)
class _Beside:
    """Images that are encoded while decode steps go on, into the slots from ``first`` on."""

    rows: list[RunningRequest]
    first: int
    encode: "Future[Timer]"


class Engine:
    """Batches requests continuously over a runner's slots.

    The device thread calls ``run``; any thread may call ``submit``, ``call``, ``pulse`` and ``stop``."""

    def __init__(
        self,
        scheduler: Scheduler,
        observe: Callable[[Work], object] = lambda work: None,
        turn_ended: Callable[[], object] = lambda: None,
    ) -> None:
        """Both functions are called on the device thread: ``observe`` with the work of each step whose tokens were
        read, ``turn_ended`` after the results of each turn were reported."""
        self.limits = scheduler.limits
        self._scheduler = scheduler
        self._observe = observe
        self._turn_ended = turn_ended
        self._calls: queue.SimpleQueue[Callable[[], Exception | None]] = queue.SimpleQueue()
        self.is_stopping = False  # new requests are refused
        self._failures = DeviceFailures()
        self._turns = self._work = 0
        self._doing = ""
        self._steps: deque[_Step] = deque()  # launched, but not yet read
        self._encoded: list[_Encoded] = []  # launched since the last step
        self._results: list[Callable[[], None]] = []  # each hands out the result of a row that has ended
        self._beside: _Beside | None = None

    def submit(self, request: CaptionRequest) -> None:
        """Queues a request; its result or exception arrives in ``request.future``. Raises NotReady if the engine
        has stopped."""
        self._scheduler.submit(request)

    def call(self, function: Callable[[], T], doing: str = "") -> "Future[T]":
        """Runs ``function`` on the device thread between two steps.

        ``doing`` names the operation in log lines, if it may take longer than a step: "make bucket 64 ready"."""
        future: Future[T] = Future()

        def run() -> Exception | None:
            self._doing = doing
            fulfil(future, function)
            self._work += 1  # before `_doing` is cleared, as `pulse` may run between both
            self._doing = ""
            error = future.exception()
            return error if isinstance(error, Exception) else None

        self._calls.put(run)
        self._scheduler.wake()
        return future

    def pulse(self) -> Pulse:
        """Returns how far the device thread is, from any thread. Also wakes the device thread, so that an idle
        thread makes a turn and so shows that it still runs."""
        doing = self._doing  # read before `_work`, because `call` counts the work before it clears `_doing`
        pulse = Pulse(self._turns, self._work, doing)
        self._scheduler.wake()
        return pulse

    def stop(self) -> None:
        """Refuses new requests and lets ``run`` return once no request is left."""
        self._scheduler.close()  # before `is_stopping`, so that every request that was accepted is served
        self.is_stopping = True

    def run(self, runner: "Runner[Any]", backend_of: Callable[[int], str]) -> None:
        """Serves requests until ``stop``; the calling thread becomes the device thread.

        ``backend_of`` takes a bucket's size and returns the name of the backend that decodes it, for the reply.
        Raises DeviceFailedError if the device was given up; every request that ran or waited has failed."""
        scheduler = self._scheduler
        while not (self.is_stopping and not scheduler.running and not scheduler.depth and self._beside is None):
            if self._beside is None:
                scheduler.wait()
            try:
                self._call_next(runner)
                if self._serve_once(runner, backend_of):
                    self._failures.none()
            except Exception as error:
                self._steps.clear()
                self._encoded = []
                self._hand_out()
                self._rejoin(runner)
                self._work += 1
                log.exception("device step failed (%d in a row)", self._failures.count + 1)
                try:
                    self._failures.judge(error, runner.device.health(error))
                except DeviceFailedError:
                    scheduler.fail_all()
                    raise
                scheduler.fail_running(EngineFailed())
            finally:
                self._turns += 1
                self._turn_ended()

    def _call_next(self, runner: "Runner[Any]") -> None:
        """Runs one waiting call, so that running rows get a step between two calls.

        An exception of the call goes to the caller's future, and is raised here too if the device is lost."""
        if self._calls.empty():
            return
        if self._beside is not None:
            wait([self._beside.encode])
        error = self._calls.get()()
        if not self._calls.empty():
            self._scheduler.wake()
        if error is not None and runner.device.health(error) == "lost":
            raise error

    def _serve_once(self, runner: "Runner[Any]", backend_of: Callable[[int], str]) -> bool:
        """Runs one turn of the engine. Returns whether tokens were read, which shows that the device works."""
        scheduler, ahead = self._scheduler, runner.device.runs_ahead
        runner.move(scheduler.drop_lost())
        done = launched = False
        if len(self._steps) > 1 or not scheduler.needs_step():
            done = self._read_next(runner, backend_of)
        if ahead:
            launched = self._launch_next(runner)
        if self._results:
            self._hand_out()
            self._turn_ended()  # clients need not wait for the images of others
        encoded = self._encode_next(runner)
        self._encoded += encoded
        if not launched:
            self._launch_next(runner)
        if not ahead:
            done = self._read_next(runner, backend_of)
            self._hand_out()
        self._work += bool(encoded or done or self._steps)
        return done

    def _launch_next(self, runner: "Runner[Any]") -> bool:
        """Launches a step if a row needs one. Returns whether it did."""
        if not self._scheduler.needs_step():
            return False
        self._steps.append(self._launch(runner))
        return True

    def _read_next(self, runner: "Runner[Any]", backend_of: Callable[[int], str]) -> bool:
        """Reads the tokens of the oldest step that was not read, if there is one. Returns whether there was."""
        if not self._steps:
            return False
        step = self._steps.popleft()
        tokens, hypotheses = self._read(step)
        backend = backend_of(step.bucket)
        runner.move(self._scheduler.advance(step.rows, tokens, backend, hypotheses, self._results))
        return True

    def _hand_out(self) -> None:
        results, self._results = self._results, []
        for hand_out in results:
            hand_out()

    def _encode_next(self, runner: "Runner[Any]") -> list[_Encoded]:
        """Admits waiting requests and encodes their images: beside the steps of running rows, where the runner can,
        and otherwise before the next step."""
        scheduler = self._scheduler
        encoded: list[_Encoded] = []
        if self._beside is not None:
            if scheduler.running and not self._beside.encode.done():
                return []
            rows, done = self._rejoin(runner)
            encoded = self._encode_admitted(runner, rows, done) if rows else []
        others, lanes = len(scheduler.running), runner.device.lanes
        admitted = scheduler.admit(by_time=runner.gains_by_batch)
        if lanes is not None:
            lanes.serve(alone=scheduler.is_lone)
        if admitted and others and lanes is not None and runner.encodes_beside:
            first = scheduler.running.index(admitted[0])
            contents = [self._row(row) for row in admitted]
            encode = lanes.beside(partial(self._encode_images, runner, admitted, contents, first))
            scheduler.set_aside(admitted)
            self._beside = _Beside(admitted, first, encode)
        elif admitted:
            encoded += self._encode_admitted(runner, admitted)
        return encoded

    def _rejoin(self, runner: "Runner[Any]") -> "tuple[list[RunningRequest], Future[Timer] | None]":
        """Waits for the encode beside steps, if there is one, and gives its requests their slots. Returns them in
        the order of their slots, and the encode."""
        if self._beside is None:
            return [], None
        beside, self._beside = self._beside, None
        wait([beside.encode])
        rows, moves = self._scheduler.put_back(beside.rows, beside.first)
        runner.move_images(moves)
        return rows, beside.encode

    def _encode_admitted(
        self, runner: "Runner[Any]", admitted: list[RunningRequest], beside: "Future[Timer] | None" = None
    ) -> list[_Encoded]:
        """Encodes the images of requests that have just got their slots, unless ``beside`` has done so.

        If that raises, each image is encoded alone, because one request may be at fault. A request that fails alone
        loses its slots. The other rows go on, because an encode writes to its own slots only. Raises the error
        if the device is lost, or no row is left whose next step could show that the device works."""
        encoded: list[_Encoded] = []
        failed: dict[RunningRequest, Exception] = {}
        groups = [admitted]
        for group in groups:
            try:
                encoded.append(self._encode(runner, group, beside if group is admitted else None))
            except Exception as error:
                if runner.device.health(error) == "lost":
                    raise
                log.exception("encoding failed (requests: %s)", ", ".join(row.request.id for row in group))
                if len(group) > 1:
                    groups += [[row] for row in group]
                else:
                    failed[group[0]] = error
        if len(failed) == len(set(self._scheduler.running)):
            raise failed[admitted[-1]]
        runner.move(self._scheduler.fail([*failed], EngineFailed()))
        return encoded

    def _encode(
        self, runner: "Runner[Any]", admitted: list[RunningRequest], beside: "Future[Timer] | None"
    ) -> _Encoded:
        scheduler = self._scheduler
        bucket = scheduler.encode_table.fit(len(admitted))
        first = scheduler.running.index(admitted[0])
        rows = [self._row(row) for row in admitted]
        timer = beside.result() if beside is not None else self._encode_images(runner, admitted, rows, first)
        runner.admit(first, rows)
        for row, content in zip(admitted, rows, strict=True):
            if row.searches:
                runner.group(scheduler.slots_of(row), content)
        for row in admitted:
            row.request.admitted()
        return _Encoded(admitted, bucket.size, timer)

    def _encode_images(
        self, runner: "Runner[Any]", admitted: list[RunningRequest], rows: list[SlotRequest], first: int
    ) -> "Timer":
        """Encodes images into the slots from ``first`` on; on the thread for encodes if that is beside steps."""
        bucket, timer = self._scheduler.encode_table.fit(len(rows)), runner.device.timer()
        runner.encode(bucket, [row.request.array for row in admitted], first, rows)
        return timer.stop()

    def _launch(self, runner: "Runner[Any]") -> _Step:
        rows = self._scheduler.launched()
        bucket = self._scheduler.step_table.fit(len(rows))
        timer = runner.device.timer()
        needs = Needs(  # lists, because `any` over a generator takes three times as long
            sampling=True in [row.samples for row in rows],
            penalties=True in [row.penalised for row in rows],
            beams=True in [row.searches for row in rows],
        )
        runner.decode_step(bucket, needs)
        tokens = runner.read_tokens(len(rows), needs.beams)
        encoded, self._encoded = self._encoded, []
        return _Step(rows, bucket.size, tokens, timer.stop(), encoded)

    def _read(self, step: _Step) -> tuple[list[int], dict[int, list[int]]]:
        """Waits for a step's tokens, and reports the durations of the step and of the encodes before it.

        Returns the tokens, and the hypotheses of the beam searches that have ended, by slot."""
        tokens = step.tokens.result()
        encodes: list[Batch] = []
        waited: list[float] = []
        for encoded in step.encoded:
            seconds = encoded.timer.seconds()
            encodes.append(Batch(encoded.bucket, len(encoded.rows), seconds))
            self._scheduler.gathering.encoded(encoded.bucket, seconds)
            for row in encoded.rows:
                row.encode_s = seconds
                waited.append(row.admitted - row.submitted)
        hypotheses = step.tokens.hypotheses()
        generated = len([row for row in step.rows if not (row.left or row.prompt_left or row.searches)])
        for slot, hypothesis in hypotheses.items():  # a beam search counts the tokens of its result alone
            row = step.rows[slot]
            generated += 0 if row.left else len(hypothesis) - 1 - len(row.request.prompt_ids)
        done = Batch(step.bucket, len(step.rows), step.timer.seconds())
        self._observe(Work(done, encodes, waited, generated))
        return tokens, hypotheses

    def _row(self, running: RunningRequest) -> SlotRequest:
        request, params = running.request, running.request.params
        uniforms: list[float] = []
        if params.samples:
            generator = random.Random(params.seed)  # noqa: S311  sampling, not secrets
            uniforms = [generator.random() for _ in range(self.limits.cache_length)]
        texts = request.text_ids, running.prefilled, request.ahead
        return SlotRequest(request.prompt_ids, params, uniforms, running.limit, *texts)
