"""Schedules requests: which wait, which run in which slot, and when they leave. Pure Python, no torch.

Continuous batching: between two decode steps waiting requests take free slots. Running rows always fill the
slots from 0 without a gap, so the smallest bucket that holds them is the one to run.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from types import MappingProxyType

from snapcap.service.engine.limits import Limits
from snapcap.service.engine.request import CaptionRequest, Completion
from snapcap.service.engine.running_request import RunningRequest
from snapcap.service.engine.waiting import Line, Waiting
from snapcap.service.errors import BeamsNotReady, DeadlineExceeded, NotReady
from snapcap.warmup.plan.buckets import BucketTable

Clock = Callable[[], float]

# Steps that a free slot stays empty at most while others are about to become free: see `Scheduler.admit`.
MOST_STEPS_HELD = 8
# A lock can be waited for no longer than some centuries, which a deadline of a test may be away.
_LONGEST_WAIT_S = 3600.0


class Scheduler:
    """A queue in front of the slots. Who may be in it is decided where clients are answered: see `Admission`.

    ``submit``, ``close`` and ``wake`` are called from any thread, the rest by the device thread.
    """

    def __init__(
        self,
        table: BucketTable,
        limits: Limits,
        clock: Clock = time.monotonic,
        cold: Iterable[int] = (),
    ) -> None:
        """``table``: the buckets that are ready. ``cold``: sizes of which ``warmed`` or ``give_up`` will tell."""
        self.table = table
        self.limits = limits
        self.running: list[RunningRequest] = []  # by slot: a beam search is in several places
        self._clock = clock
        self._waiting = Line(table.largest.size, cold)
        self._changed = threading.Condition()
        self._closed = False
        self._woken = False
        self._held = 0  # steps since a slot was left empty
        self._cancelled = False  # a request, since it was last looked for
        self._look_at = math.inf  # no deadline passes before

    @property
    def depth(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def submit(self, request: CaptionRequest) -> None:
        """Queue a request.

        Raises:
            NotReady: the engine has stopped.
            BeamsNotReady: no batch here will ever have so many rows.
        """
        with self._changed:
            if self._closed:
                raise NotReady("draining")
            request = request.within(self.table.largest.size)
            if request.params.num_beams > self._waiting.most:
                raise BeamsNotReady(request.params.num_beams, self._waiting.most)
            self._waiting.append(Waiting(request, self._clock()))
            self._look_at = min(self._look_at, request.deadline)
            self._woken = True  # also where it stands aside: its deadline may be the next
            self._changed.notify()
        request.future.add_done_callback(self._note_cancelled)

    def wait(self) -> None:
        """Sleep until there is a request to serve, ``wake`` or ``close`` was called, or a deadline has passed."""
        with self._changed:
            # Who stands aside needs to be looked for at its deadline only.
            patience = min(max(self._look_at - self._clock(), 0.0), _LONGEST_WAIT_S)
            self._changed.wait_for(self._has_work, patience)
            self._woken = False

    def wake(self) -> None:
        """Make the next (or the present) ``wait`` return."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def warmed(self, size: int) -> None:
        """A cold bucket is ready: batches may have so many rows from the next step on."""
        with self._changed:
            self.table = BucketTable.of((*self.table.sizes, size))
            self._waiting.warmed(size)

    def give_up(self, size: int) -> None:
        """A cold bucket cannot be made ready: who could only run there is refused."""
        with self._changed:
            lost, most = self._waiting.give_up(size), self._waiting.most
        for entry in lost:
            _set_exception(entry.request, BeamsNotReady(entry.slots, most))

    def close(self) -> None:
        """Refuse new requests; what waits or runs goes on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def drop_lost(self) -> list[tuple[int, int]]:
        """Forget requests whose client has left or whose deadline has passed, before they cost device time.

        Returns the moves (source slot, target slot) that close the gaps among running rows.
        """
        now = self._clock()
        if not self._cancelled and now < self._look_at:
            return []  # at nearly every step
        self._cancelled = False
        with self._changed:
            self._waiting.keep(lambda entry: not self._is_lost(entry.request, now))
            running = list(dict.fromkeys(self.running))
            requests = [entry.request for entry in self._waiting] + [row.request for row in running]
            self._look_at = min((each.deadline for each in requests if each.deadline > now), default=math.inf)
        return self._compact([row for row in running if self._is_lost(row.request, now)])

    def admit(self) -> list[RunningRequest]:
        """Give waiting requests the next free slots, first come first served; they run from now on.

        One that needs more slots than are free waits for them, and those behind it wait as well: else it might
        wait for ever. (One that needs more than there are stands aside: see `Line`.) Each has one of the next
        slots, in order; behind these are the others of beam searches.

        Where more wait than there are slots, a free slot may stay empty for a few steps: an image costs less to
        encode in a batch than alone.
        """
        with self._changed:
            free = self.table.largest.size - len(self.running)
            fitting = 0 if self._holds_back(free) else self._waiting.fitting(free)
            entries = self._waiting.take(self.table.admit(fitting) if fitting else 0)
        now = self._clock()
        admitted = [self._admitted(entry, now) for entry in entries]
        self.running += admitted
        self.running += [row for row in admitted for _ in range(row.slots - 1)]
        return admitted

    def _admitted(self, entry: Waiting, now: float) -> RunningRequest:
        request, limits = entry.request, self.limits
        prompt = len(request.prompt_ids)
        prefilled = limits.prefilled(prompt)
        return RunningRequest(
            request=request,
            limit=limits.new_tokens(prompt, request.params.max_new_tokens),
            submitted=entry.submitted,
            admitted=now,
            prefilled=prefilled,
            prompt_left=prompt - prefilled,
            forced_end=limits.forced_end,
        )

    def _holds_back(self, free: int) -> bool:
        """Whether to wait until a bucket of at most half the slots is free.

        With as many requests as slots, or fewer, there is no waiting: so many then do not wait for a slot.
        """
        largest = self.table.largest.size
        batch = max((size for size in self.table.sizes if 2 * size <= largest), default=1)
        if not 0 < free < batch <= self._waiting.servable:
            self._held = 0
            return False
        self._held += 1
        return self._held <= MOST_STEPS_HELD

    def slots_of(self, row: RunningRequest) -> list[int]:
        """Where a request runs."""
        return [slot for slot, each in enumerate(self.running) if each is row]

    def needs_step(self) -> bool:
        """Whether a row may still be without its last token once the steps that were launched are through."""
        return any(row.steps < row.total for row in self.running)

    def launched(self) -> list[RunningRequest]:
        """Count a step that the device has been given for all running rows; returns these, in slot order."""
        for row in dict.fromkeys(self.running):
            row.steps += 1
        return list(self.running)

    def advance(
        self,
        rows: Sequence[RunningRequest],
        tokens: Sequence[int],
        backend: str,
        hypotheses: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> list[tuple[int, int]]:
        """Take the tokens of a step, one for each row that was running when it was launched, and complete the rows
        that end with it. A row that has left since then is passed over.

        ``hypotheses``: for each beam search that ended, by one of its slots, the start token, the prompt, and what
        was generated with its end.

        Returns the moves (source slot, target slot) that close the gaps among running rows.
        """
        finished, eos_ids = [], self.limits.eos_ids
        for slot, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            if row.left:
                continue
            if row.searches:
                if slot in hypotheses:
                    row.found(hypotheses[slot][1 + len(row.request.prompt_ids) :], eos_ids)
                    finished.append(row)
                continue
            if row.prompt_left:
                row.prompt_left -= 1
                continue
            if token in eos_ids:
                row.finish_reason = "stop"
            else:
                row.tokens.append(token)
                if row.request.on_token is not None:
                    row.request.on_token(token)
                if len(row.tokens) >= row.limit:
                    row.finish_reason = "length"
            if row.finish_reason is not None:
                finished.append(row)
        now = self._clock() if finished else 0.0
        for row in finished:
            self._complete(row, backend, now)
        return self._compact(finished)

    def fail_running(self, error: Exception) -> None:
        """Every running row fails; its slot is free. What waits is kept."""
        for row in dict.fromkeys(self.running):
            row.left = True
            _set_exception(row.request, error)
        self.running = []

    def fail_all(self) -> None:
        """Nobody will serve any more: everything that runs or waits is told to come again, as it may ask another
        server, and nothing is taken in."""
        self.close()
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.keep(lambda entry: False)
        for entry in waiting:
            _set_exception(entry.request, NotReady("failed"))
        self.fail_running(NotReady("failed"))

    def _has_work(self) -> bool:
        over = self._closed and not self._waiting
        return bool(self._waiting.servable or self.running or self._woken or over)

    def _note_cancelled(self, future: "Future[Completion]") -> None:
        if future.cancelled():
            self._cancelled = True

    def _is_lost(self, request: CaptionRequest, now: float) -> bool:
        if request.future.cancelled():
            return True
        if now < request.deadline:
            return False
        _set_exception(request, DeadlineExceeded())
        return True

    def _compact(self, gone: list[RunningRequest]) -> list[tuple[int, int]]:
        """Fill each freed slot with one of the last running rows, so that rows stay contiguous."""
        if not gone:
            return []
        for row in gone:
            row.left = True
        count = sum(not row.left for row in self.running)
        free = [slot for slot, row in enumerate(self.running[:count]) if row.left]
        last = [slot for slot, row in enumerate(self.running) if slot >= count and not row.left]
        moves = list(zip(reversed(last), free, strict=True))
        for source, target in moves:
            self.running[target] = self.running[source]
        del self.running[count:]
        return moves

    def _complete(self, row: RunningRequest, backend: str, now: float) -> None:
        completion = Completion(
            tokens=tuple(row.tokens),
            finish_reason=row.finish_reason or "stop",
            backend=backend,
            queue_s=row.admitted - row.submitted,
            encode_s=row.encode_s,
            decode_s=now - row.admitted - row.encode_s,
        )
        with suppress(InvalidStateError):  # the client left at this very moment
            row.request.future.set_result(completion)


def _set_exception(request: CaptionRequest, error: Exception) -> None:
    with suppress(InvalidStateError):  # cancelled meanwhile
        request.future.set_exception(error)
