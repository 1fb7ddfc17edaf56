"""Runs an engine over a runner of lists, on a thread of its own. No torch."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from snapcap.service.engine.engine import Engine
from snapcap.service.engine.request import CaptionRequest, Completion, Limits
from snapcap.service.engine.scheduler import Scheduler
from snapcap.service.telemetry.work import Work
from snapcap.warmup.plan.plan import Bucket, BucketTable
from snapcap.warmup.runtime.devices import CpuLanes
from snapcap.warmup.runtime.slot_request import Needs, SamplingParams, SlotRequest

if TYPE_CHECKING:
    from snapcap.warmup.runtime.devices import DeviceHealth

PATIENCE = 30.0
START, EOS = 1, 2
LIMITS = Limits(cache_length=32, default_new_tokens=5, eos_ids=frozenset({EOS}))


class ListDevice:
    """A device that reports the health that a test sets, and measures no time. ``threads``: how many threads each
    operation was given."""

    def __init__(self, runs_ahead: bool, encodes_beside: bool) -> None:
        self.runs_ahead = runs_ahead
        self.threads: list[int] = []
        self.lanes = CpuLanes(self.threads.append, usual=1, alone=2) if encodes_beside else None
        self.condition: DeviceHealth = "failed"

    def health(self, error: Exception) -> "DeviceHealth":
        return self.condition

    def timer(self) -> "Timer":
        return Timer()


class ListRunner:
    """Slots as lists. Request n generates 100 n, 100 n + 1, …; a padded slot generates what nobody may see.

    A beam search does so too, but keeps it until the end; its beams must run in step, each in a slot of its own.
    """

    def __init__(self, slots: int, runs_ahead: bool = False, encodes_beside: bool = False) -> None:
        self.device = ListDevice(runs_ahead, encodes_beside)
        self.encodes_beside = encodes_beside
        self.gains_by_batch = runs_ahead
        self.beside: set[int] = set()  # the slots of an encode beside steps, until its rows are admitted
        self.unread = 0
        self.images = [-1] * slots
        self.rows: list[SlotRequest] = [SlotRequest()] * slots
        self.counts = [0] * slots
        self.beams: list[int | None] = [None] * slots
        self.steps: list[tuple[int, Needs]] = []
        self.order: list[str] = []
        self.encoded: list[tuple[int, int]] = []
        self.before_step: Callable[[], object] = lambda: None
        self.before_encode: Callable[[], object] = lambda: None

    def encode(self, bucket: Bucket, images: list[int], first_slot: int, rows: Sequence[SlotRequest] = ()) -> None:
        if threading.current_thread().name == "encodes":
            assert not self.beside
            self.beside = set(range(first_slot, first_slot + len(images)))
        self.before_encode()
        assert len(images) <= bucket.size
        self.encoded.append((bucket.size, len(images)))
        self.images[first_slot : first_slot + len(images)] = [
            int(each) if isinstance(each, float) else each for each in images
        ]

    def admit(self, first_slot: int, rows: list[SlotRequest]) -> None:
        self.beside = set()
        for slot, row in enumerate(rows, start=first_slot):
            self.rows[slot], self.counts[slot], self.beams[slot] = row, 0, None

    def group(self, slots: list[int], row: SlotRequest) -> None:
        assert len(set(slots)) == row.params.num_beams
        assert self.rows[slots[0]] is row
        for beam, slot in enumerate(slots):
            self.images[slot], self.rows[slot], self.counts[slot] = self.images[slots[0]], row, 0
            self.beams[slot] = beam

    def decode_step(self, bucket: Bucket, needs: Needs) -> None:
        self.before_step()
        self.steps.append((bucket.size, needs))
        self.order.append("launch")
        for slot in range(bucket.size):
            self.counts[slot] += 1

    def read_tokens(self, rows: int, beams: bool) -> "Tokens":
        assert self.unread <= 1, "three steps are under way"
        self.unread += 1
        ended = {slot: self._hypothesis(slot) for slot in range(rows) if self._ends(slot, rows)} if beams else {}
        return Tokens(self, [self._token(slot) for slot in range(rows)], ended)

    def move(self, moves: list[tuple[int, int]]) -> None:
        for source, target in moves:
            assert target not in self.beside
            for held in (self.images, self.rows, self.counts, self.beams):
                held[target] = held[source]  # type: ignore[index]

    def move_images(self, moves: list[tuple[int, int]]) -> None:
        self.move(moves)

    def _token(self, slot: int) -> int:
        place, prompt = self.counts[slot] - 1, self.rows[slot].prompt
        return prompt[place] if place < len(prompt) else 100 * self.images[slot] + place - len(prompt)

    def _ends(self, slot: int, rows: int) -> bool:
        row = self.rows[slot]
        if not row.params.searches or self.beams[slot] != 0 or self.counts[slot] < len(row.prompt) + row.new_tokens:
            return False
        mates = [
            at for at, row in enumerate(self.rows[:rows]) if row is self.rows[slot] and self.beams[at] is not None
        ]
        assert {self.counts[at] for at in mates} == {self.counts[slot]}
        return True

    def _hypothesis(self, slot: int) -> list[int]:
        row, first = self.rows[slot], 100 * self.images[slot]
        assert row.params.searches
        return [START, *row.prompt, *range(first, first + row.new_tokens)]


class Tokens:
    """A step's tokens; they are those of when it was launched."""

    def __init__(self, runner: ListRunner, tokens: list[int], hypotheses: dict[int, list[int]]) -> None:
        self._runner = runner
        self._tokens = tokens
        self._hypotheses = hypotheses

    def hypotheses(self) -> dict[int, list[int]]:
        return self._hypotheses

    def result(self) -> list[int]:
        self._runner.unread -= 1
        self._runner.order.append("read")
        return self._tokens


class Timer:
    def stop(self) -> "Timer":
        return self

    def seconds(self) -> float:
        return 0.0


class Observer:
    def __init__(self) -> None:
        self.waited: list[float] = []
        self.encodes: list[tuple[int, int]] = []
        self.steps: list[tuple[int, int]] = []
        self.generated = 0

    def __call__(self, work: Work) -> None:
        self.waited += work.waited
        self.encodes += [batch[:2] for batch in work.encodes]
        self.steps.append(work.step[:2])
        self.generated += work.generated


class Served:
    """An engine on a thread of its own. ``held`` keeps it between two steps while requests are sent."""

    def __init__(
        self,
        runs_ahead: bool = False,
        cold: tuple[int, ...] = (),
        encodes_beside: bool = False,
        steps_alone: tuple[int, ...] = (),
    ) -> None:
        """The buckets are 1, 4 and 8. ``cold`` are not ready yet, and ``steps_alone`` encode nothing."""
        sizes = (1, 4, 8)
        self.runner = ListRunner(max(sizes), runs_ahead, encodes_beside)
        self.observer = Observer()
        table = BucketTable.of(size for size in sizes if size not in cold)
        self.scheduler = Scheduler(table, LIMITS, cold=cold, steps_alone=steps_alone)
        self.engine = Engine(self.scheduler, self.observer)
        self.outcome: Future[None] = Future()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        runner: Any = self.runner
        try:
            self.engine.run(runner, lambda size: f"b{size}")
            self.outcome.set_result(None)
        except BaseException as error:
            self.outcome.set_exception(error)

    def hold(self) -> threading.Event:
        return hold(self.engine)

    def send(
        self, image: int, prompt: tuple[int, ...] = (), deadline: float = 1e12, **params: Any
    ) -> CaptionRequest:
        pixels: Any = float(image)  # a whole number would be a slot of the shared memory
        sent = CaptionRequest(str(image), pixels, prompt, SamplingParams(**params), deadline, Future())
        self.engine.submit(sent)
        return sent


def hold(engine: Engine, patience: float = PATIENCE) -> threading.Event:
    """Stop the device thread of an engine between two steps until the event is set."""
    reached, release = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        release.wait(patience)

    engine.call(wait)
    assert reached.wait(patience)
    return release


def result(sent: CaptionRequest) -> Completion:
    return sent.future.result(PATIENCE)
