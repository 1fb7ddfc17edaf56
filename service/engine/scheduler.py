"""Schedules requests: which wait, which run in which slot, and when they leave. Pure Python, imports no torch.

Waiting requests take free slots between two decode steps (continuous batching). Running rows always fill the slots
from 0 without a gap, so each step runs the smallest bucket that holds all rows. Some buckets are of steps alone:
images are encoded in the other ones, so more rows may run than are encoded at once.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import field
from functools import partial
from heapq import merge
from itertools import chain, islice
from operator import attrgetter

from snapcap.models.dataclass import dataclass
from snapcap.service.engine.request import CaptionRequest, Completion, FinishReason, Limits
from snapcap.service.errors import BeamsNotReady, DeadlineExceeded, EngineFailed, NotReady
from snapcap.warmup.plan.plan import BucketTable


@dataclass(eq=False)
class RunningRequest:
    """A request that has a slot on the device, or one slot for each beam of a beam search."""

    request: CaptionRequest
    limit: int
    submitted: float
    admitted: float
    encode_s: float = 0.0
    prefilled: int = 0  # tokens, of the start token and the prompt, that were read with the image
    prompt_left: int = 0  # prompt tokens that decode steps have yet to read
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    steps: int = 0  # decode steps launched for the request
    left: bool = False  # the request has ended: its slots may belong to other requests
    forced_end: bool = False  # a caption of the greatest length is ended with an end token
    # The next four follow from the request's parameters. Each step reads them for every row, so they are kept.
    slots: int = field(init=False)
    samples: bool = field(init=False)
    searches: bool = field(init=False)
    penalised: bool = field(init=False)  # penalties change the scores
    total: int = field(init=False)  # greatest number of decode steps until the last token

    def __post_init__(self) -> None:
        params = self.request.params
        self.slots = params.num_beams
        self.samples = params.samples
        self.searches = params.searches
        self.penalised = params.penalised
        if self.forced_end and not self.searches:
            # The forced end token is no text, so a row without beams stops one token earlier and never generates
            # it.
            self.limit = max(1, self.limit - 1)
        self.total = self.prompt_left + self.limit

    def found(self, generated: Sequence[int], eos_ids: Container[int]) -> None:
        """Sets the tokens and the finish reason of a beam search, which has its tokens all at once."""
        ended = bool(generated) and generated[-1] in eos_ids
        self.tokens = list(generated[:-1] if ended else generated)
        cut_off = self.forced_end and len(generated) >= self.limit
        self.finish_reason = "stop" if ended and not cut_off else "length"


@dataclass(frozen=True)
class Waiting:
    """A waiting request. `submitted` is the moment it was queued, on the scheduler's clock."""

    request: CaptionRequest
    submitted: float

    @property
    def slots(self) -> int:
        """Number of slots the request needs at the same time."""
        return self.request.params.num_beams


class Line:
    """Queues requests first come first served. Not thread-safe: the scheduler calls it under its lock.

    A request with more beams than the largest ready bucket has rows is set aside, and later requests overtake it,
    because it cannot run yet. Once a bucket that fits it is ready, the request has its old place in the queue again
    and is not overtaken any more."""

    def __init__(self, rows: int, cold: Iterable[int] = ()) -> None:
        """``rows`` is the size of the largest bucket that is ready, ``cold`` the sizes that are not ready yet."""
        self._rows = rows
        self._cold = set(cold)
        self._next: deque[Waiting] = deque()
        self._aside: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._next) + len(self._aside)

    def __iter__(self) -> Iterator[Waiting]:
        return chain(self._next, self._aside)

    @property
    def servable(self) -> int:
        """Number of waiting requests that a ready bucket fits."""
        return len(self._next)

    @property
    def most(self) -> int:
        """Greatest number of slots that a request may have, now or once the cold buckets are ready."""
        return max((self._rows, *self._cold))

    def append(self, entry: Waiting) -> None:
        (self._next if entry.slots <= self._rows else self._aside).append(entry)

    def warmed(self, rows: int) -> None:
        """Makes the bucket of ``rows`` rows ready, and queues the requests that were set aside for it."""
        self._cold.discard(rows)
        self._rows = max(rows, self._rows)
        back = [entry for entry in self._aside if entry.slots <= self._rows]
        self._aside = deque(entry for entry in self._aside if entry.slots > self._rows)
        self._next = deque(merge(back, self._next, key=attrgetter("submitted")))

    def give_up(self, rows: int) -> list[Waiting]:
        """Drops the bucket of ``rows`` rows, which will never be ready. Removes the requests that only it fits, and
        returns them."""
        self._cold.discard(rows)
        lost = [entry for entry in self._aside if entry.slots > self.most]
        self._aside = deque(entry for entry in self._aside if entry.slots <= self.most)
        return lost

    def fitting(self, free: int) -> int:
        """Number of requests, from the head of the queue, that fit together into ``free`` slots."""
        count = 0
        for entry in self._next:
            free -= entry.slots
            if free < 0:
                break
            count += 1
        return count

    def first(self, count: int) -> list[Waiting]:
        """Returns the first ``count`` requests, which stay in the queue."""
        return list(islice(self._next, count))

    def take(self, count: int) -> list[Waiting]:
        """Removes the first ``count`` requests from the queue and returns them."""
        return [self._next.popleft() for _ in range(count)]

    def keep(self, wanted: Callable[[Waiting], bool]) -> None:
        """Removes the requests that are not ``wanted``, including those that were set aside."""
        self._next = deque(entry for entry in self._next if wanted(entry))
        self._aside = deque(entry for entry in self._aside if wanted(entry))


class Gathering:
    """Decides how many images are encoded together, and how long the first ones wait for more.

    The least time of the encodes of each bucket counts, because other work may have held up the others. Only the
    device thread calls this class.

    **While nothing runs.** Clients whose captions ended together often send their next images together too, and the
    first of these images would be encoded alone. So if several captions ended within half the time of an image's
    encode, the first image waits for as many, and at most as long again.

    **While rows run** on a GPU, all of them wait for each encode. An image takes less time in a large batch than in
    a small one, and holds the rows up for less time. So images wait until the sum of their waits is as long as the
    time that a full batch would save all rows. Nobody knows whether more images come in time; this rule loses at
    most twice as much as the best choice would (the ski rental problem)."""

    def __init__(self, most: int) -> None:
        """``most`` is the greatest number of captions that can end together."""
        self._ended: deque[float] = deque(maxlen=most)  # when the last captions ended
        self._least: dict[int, float] = {}  # seconds of an encode, by the size of its bucket
        self._parts: dict[int, int] = {}  # how many of so many images are encoded first
        self._encodes = 0

    def encoded(self, size: int, seconds: float) -> None:
        """Notes the time of an encode in the bucket of ``size`` images."""
        self._encodes += 1
        if self._encodes % _REMEMBERED == 0:
            self._least.clear()
        if seconds < self._least.get(size, math.inf):
            self._least[size] = seconds
            self._parts.clear()

    def ended(self, captions: int, moment: float) -> None:
        """Notes that captions ended."""
        self._ended += [moment] * captions

    def begin(self) -> tuple[int, float]:
        """Returns the number of images to wait for while nothing runs, and the moment when the wait ends. Forgets
        the captions that have ended, so that their clients are waited for once."""
        patience = min(_GATHERED_PART * self._image_s, _LONGEST_GATHER_S)
        last = self._ended[-1] if self._ended else -math.inf
        images = sum(last - moment <= patience for moment in self._ended)
        self._ended.clear()
        return images, last + patience

    def first_part(self, images: int, table: BucketTable) -> int:
        """Returns how many of so many images to encode first: all, unless several encodes take a fifth less time.
        Where the bucket that holds all was never used, padding decides, as `BucketTable.admit` says."""
        images = min(images, table.largest.size)
        whole = self._least.get(table.fit(images).size)
        if whole is None:
            return table.admit(images)
        if images not in self._parts:
            seconds, parts = self._split(images)
            self._parts[images] = max(parts) if seconds < _WORTH_A_SPLIT * whole else images
        return self._parts[images]

    def _split(self, images: int) -> tuple[float, list[int]]:
        """Returns the seconds and the numbers of images of the encodes that take the least time together."""
        splits: list[tuple[float, list[int]]] = [(0.0, [])]  # for each number of images
        for count in range(1, images + 1):
            ways = []
            for size, seconds in self._least.items():
                others, parts = splits[max(count - size, 0)]
                ways.append((seconds + others, [min(size, count), *parts]))
            splits.append(min(ways, key=lambda way: (way[0], len(way[1]))))
        return splits[images]

    def waits(self, images: Sequence[Waiting], table: BucketTable, rows: int, now: float) -> bool:
        """Returns whether the images to be encoded first wait for more, while so many rows run."""
        seconds = self._least.get(table.fit(len(images)).size, 0.0)
        saved = rows * (seconds - len(images) * self._image_s)
        if saved <= 0 or now - images[0].submitted >= MOST_ENCODES_WAITED * min(self._least.values()):
            return False
        if any(now - each.submitted >= _WAITED_PART * (each.request.deadline - each.submitted) for each in images):
            return False
        return sum(now - each.submitted for each in images) < saved

    @property
    def _image_s(self) -> float:
        """The least seconds of an encode for each image of its bucket; infinite before the first encode."""
        return min((seconds / size for size, seconds in self._least.items()), default=math.inf)


Clock = Callable[[], float]
_logger = logging.getLogger("snapcap.engine")

# Greatest number of steps that a free slot stays empty while other slots are about to become free: see
# `Scheduler.admit`.
MOST_STEPS_HELD = 8
# Number of encodes after which their times are forgotten. If other work held up each encode of a bucket, the bucket
# may look slow, and then it would never be used and measured again.
_REMEMBERED = 1000
# Images are encoded in several parts if these take less than this share of the time of one encode of all.
_WORTH_A_SPLIT = 0.8
# Longest wait of an image for others while rows run, in encodes of the bucket that takes the least time.
MOST_ENCODES_WAITED = 6
# Longest such wait as a part of the time until the request's deadline.
_WAITED_PART = 0.125
# Part of an image's encode for which the device stays idle while the clients of a batch may send their next images:
# see `Gathering`.
_GATHERED_PART = 0.5
# Seconds of the longest such wait, which holds up other clients.
_LONGEST_GATHER_S = 0.25
# Seconds of the longest wait for a lock, because Python refuses a timeout of centuries and without requests there
# is no deadline.
_LONGEST_WAIT_S = 3600.0


class Scheduler:
    """Moves requests from a queue to slots. `Admission`, in the HTTP process, bounds the queue.

    ``submit``, ``close`` and ``wake`` are called from any thread, the other methods by the device thread."""

    def __init__(
        self,
        table: BucketTable,
        limits: Limits,
        clock: Clock = time.monotonic,
        cold: Iterable[int] = (),
        steps_alone: Collection[int] = (),
    ) -> None:
        """``table`` has the buckets that are ready. ``cold`` has the sizes of buckets that are not ready yet:
        ``warmed`` or ``give_up`` is called with each of them later. ``steps_alone`` has the sizes, ready or
        cold, in which nothing is encoded."""
        self.step_table = table
        self.encode_table = BucketTable.of(size for size in table.sizes if size not in steps_alone)
        self.limits = limits
        self._steps_alone = frozenset(steps_alone)
        self.running: list[RunningRequest] = []  # by slot: a beam search stands in several slots
        self._clock = clock
        self._waiting = Line(table.largest.size, cold)
        self._changed = threading.Condition()
        self._closed = False
        self._woken = False
        self._held = 0  # steps since a free slot was first kept empty
        self._cancelled = False  # a request was cancelled since the last `drop_lost`
        self.gathering = Gathering(self._waiting.most)
        self._look_at = math.inf  # the earliest deadline

    @property
    def depth(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    @property
    def is_lone(self) -> bool:
        """Returns whether one request runs and none waits."""
        return not self.depth and len({*self.running}) == 1

    def submit(self, request: CaptionRequest) -> None:
        """Queues a request. Raises NotReady if the engine has stopped, and BeamsNotReady if the request has more
        beams than any bucket here will ever have rows."""
        with self._changed:
            if self._closed:
                raise NotReady("draining")
            request = request.within(self.step_table.largest.size)
            if request.params.num_beams > self._waiting.most:
                raise BeamsNotReady(request.params.num_beams, self._waiting.most)
            self._waiting.append(Waiting(request, self._clock()))
            self._look_at = min(self._look_at, request.deadline)
            self._woken = True  # even if no ready bucket fits the request, as its deadline may be the earliest
            self._changed.notify()
        request.future.add_done_callback(self._note_cancelled)

    def wait(self) -> None:
        """Sleeps until there is a request to serve, ``wake`` or ``close`` was called, or a deadline has passed. If
        nothing runs, the first request then waits for others, as `Gathering` says."""
        with self._changed:
            # A request that no ready bucket fits does not wake the thread before its deadline.
            patience = min(max(self._look_at - self._clock(), 0.0), _LONGEST_WAIT_S)
            self._changed.wait_for(self._has_work, patience)
            self._woken = False
            if self._waiting.servable and not self.running:
                images, until = self.gathering.begin()
                images = min(images, self.encode_table.largest.size)
                left = min(until, self._look_at) - self._clock()
                if left > 0:
                    self._changed.wait_for(lambda: self._closed or self._waiting.servable >= images, left)

    def wake(self) -> None:
        """Makes the next (or the present) ``wait`` return."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def warmed(self, size: int) -> None:
        """Adds a bucket that has become ready: batches may have ``size`` rows from the next step on."""
        with self._changed:
            self.step_table = BucketTable.of((*self.step_table.sizes, size))
            if size not in self._steps_alone:
                self.encode_table = BucketTable.of((*self.encode_table.sizes, size))
            self._waiting.warmed(size)

    def give_up(self, size: int) -> None:
        """Drops a cold bucket that cannot be made ready, and refuses the requests that fit no other bucket."""
        with self._changed:
            lost, most = self._waiting.give_up(size), self._waiting.most
        for entry in lost:
            entry.request.fail(BeamsNotReady(entry.slots, most))

    def close(self) -> None:
        """Refuses new requests. Requests that wait or run are still served."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def drop_lost(self) -> list[tuple[int, int]]:
        """Drops requests whose client has left or whose deadline has passed, before they cost device time.

        Returns the moves (source slot, target slot) that close the gaps among running rows."""
        now = self._clock()
        if not self._cancelled and now < self._look_at:
            return []  # the case of nearly every step
        self._cancelled = False
        with self._changed:
            self._waiting.keep(lambda entry: not self._is_lost(entry.request, now))
            running = list(dict.fromkeys(self.running))
            requests = [entry.request for entry in self._waiting] + [row.request for row in running]
            self._look_at = min((each.deadline for each in requests if each.deadline > now), default=math.inf)
        return self._compact([row for row in running if self._is_lost(row.request, now)])

    def admit(self, by_time: bool = True) -> list[RunningRequest]:
        """Gives waiting requests the next free slots, first come first served, and returns these requests.

        A request that needs more slots than are free waits for them, and the requests behind it wait as well:
        otherwise it might wait for ever. (`Line` sets requests aside that need more slots than there are.) Each
        request gets one of the next slots, in order; the further slots of beam searches follow behind all of these.

        If more requests wait than there are slots, a free slot may stay empty for a few steps: an image costs less
        to encode in a batch than alone. At most as many requests are admitted as one encode holds.

        ``by_time``: the times of encodes decide how many requests are admitted, and whether they wait for more, as
        `Gathering` says. False: padding decides, as on a CPU, where a batch takes as long as its images alone, and
        for pictures of any shape, whose encodes take times of their own."""
        with self._changed:
            now = self._clock()  # not before the lock: a request may be queued meanwhile
            free = self.step_table.largest.size - len(self.running)
            fitting = 0 if self._holds_back(free) else self._waiting.fitting(free)
            entries = self._waiting.take(self._first_part(fitting, by_time, now) if fitting else 0)
        admitted = [row for entry in entries if (row := self._admitted(entry, now)) is not None]
        self._place(admitted)
        return admitted

    def _first_part(self, fitting: int, by_time: bool, now: float) -> int:
        """Returns how many of ``fitting`` requests to admit now."""
        table, gathering = self.encode_table, self.gathering
        if not by_time:
            return table.admit(fitting)
        count = gathering.first_part(fitting, table)
        if not self.running or self._closed:
            return count
        return 0 if gathering.waits(self._waiting.first(count), table, len(self.running), now) else count

    def set_aside(self, admitted: list[RunningRequest]) -> None:
        """Takes the requests that were just admitted out of the running rows until `put_back`. Nobody may be
        admitted meanwhile."""
        del self.running[len(self.running) - sum(row.slots for row in admitted) :]

    def put_back(
        self, rows: list[RunningRequest], first: int
    ) -> tuple[list[RunningRequest], list[tuple[int, int]]]:
        """Gives requests that were set aside the next slots, and drops the lost ones. ``first`` is the slot with
        the first one's image, and the other images follow.

        Returns the requests in the order of their new slots, and the moves (source slot, target slot) that bring
        their images there."""
        now, begin = self._clock(), len(self.running)
        images = {first + place: row for place, row in enumerate(rows) if not self._is_lost(row.request, now)}
        slots = range(begin, begin + len(images))
        away = [slot for slot in images if slot not in slots]
        moves = list(zip(away, [slot for slot in slots if slot not in images], strict=True))
        for source, target in moves:
            images[target] = images.pop(source)
        ordered = [images[slot] for slot in slots]
        self._place(ordered)
        self._look_at = min([self._look_at, *(row.request.deadline for row in ordered)])
        return ordered, moves

    def _place(self, rows: list[RunningRequest]) -> None:
        self.running += rows
        self.running += [row for row in rows for _ in range(row.slots - 1)]

    def _admitted(self, entry: Waiting, now: float) -> RunningRequest | None:
        """Returns a request with its bounds; None if they cannot be told, which fails this request alone."""
        request, limits = entry.request, self.limits
        prompt = len(request.prompt_ids)
        try:
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
        except Exception:
            _logger.exception("request fails alone", extra={"fields": {"request_id": request.id}})
            request.fail(EngineFailed())
            return None

    def _holds_back(self, free: int) -> bool:
        """Returns whether to leave free slots empty until as many are free as the largest bucket of encodes with at
        most half as many rows as there are slots.

        Slots are never kept empty for fewer waiting requests than that bucket has rows, so also not while the
        server has no more requests than slots."""
        slots = self.step_table.largest.size
        batch = max((size for size in self.encode_table.sizes if 2 * size <= slots), default=1)
        if not 0 < free < batch <= self._waiting.servable:
            self._held = 0
            return False
        self._held += 1
        return self._held <= MOST_STEPS_HELD

    def slots_of(self, row: RunningRequest) -> list[int]:
        """Returns the slots of a running request."""
        return [slot for slot, each in enumerate(self.running) if each is row]

    def needs_step(self) -> bool:
        """Returns whether a row may need another step after the steps that were launched."""
        return any(row.steps < row.total for row in self.running)

    def launched(self) -> list[RunningRequest]:
        """Counts a step that was launched for all running rows. Returns these rows in slot order."""
        for row in dict.fromkeys(self.running):
            row.steps += 1
        return list(self.running)

    def advance(
        self,
        rows: Sequence[RunningRequest],
        tokens: Sequence[int],
        backend: str,
        hypotheses: Mapping[int, Sequence[int]],
        later: list[Callable[[], None]],
    ) -> list[tuple[int, int]]:
        """Takes the tokens of a step, one for each row that was running when the step was launched, and completes
        the rows that end with it. A row that has left since then is skipped.

        ``hypotheses`` has each beam search that ended, under one of its slots: the start token, the prompt and the
        generated tokens with their end token. ``later`` receives, for each row that ends, a function that hands
        out its result, so that the next step can be launched first.

        Returns the moves (source slot, target slot) that close the gaps among running rows."""
        finished = [
            row
            for slot, (row, token) in enumerate(zip(rows, tokens, strict=True))
            if not row.left and self._ends(row, token, hypotheses.get(slot))
        ]
        if not finished:
            return []
        now = self._clock()
        later += [partial(self._complete, row, backend, now) for row in finished]
        self.gathering.ended(len(finished), now)
        return self._compact(finished)

    def _ends(self, row: RunningRequest, token: int, hypothesis: Sequence[int] | None) -> bool:
        """Gives a row the token of a step. Returns whether the row ends with it."""
        eos_ids = self.limits.eos_ids
        if row.searches:
            if hypothesis is None:
                return False  # a search stands in several slots, and ends under one of them
            row.found(hypothesis[1 + len(row.request.prompt_ids) :], eos_ids)
        elif row.prompt_left:
            row.prompt_left -= 1
        elif token in eos_ids:
            row.finish_reason = "stop"
        else:
            row.tokens.append(token)
            if not row.request.generated(token) or len(row.tokens) >= row.limit:
                row.finish_reason = "length"
        return row.finish_reason is not None

    def fail(self, rows: Iterable[RunningRequest], error: Exception) -> list[tuple[int, int]]:
        """Fails running rows and frees their slots. Waiting requests are kept.

        Returns the moves (source slot, target slot) that close the gaps among the other rows."""
        gone = list(dict.fromkeys(rows))
        for row in gone:
            row.request.fail(error)
        return self._compact(gone)

    def fail_running(self, error: Exception) -> None:
        """Fails every running row and frees its slots. Waiting requests are kept."""
        self.fail(self.running, error)

    def fail_all(self) -> None:
        """Fails every running and waiting request with `NotReady`, so that its client tries another server, and
        refuses new requests."""
        self.close()
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.keep(lambda entry: False)
        for entry in waiting:
            entry.request.fail(NotReady("failed"))
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
        request.fail(DeadlineExceeded())
        return True

    def _compact(self, gone: list[RunningRequest]) -> list[tuple[int, int]]:
        """Fills each freed slot with one of the last running rows, so that rows stay contiguous. Both are in
        ascending order, so that rows that stand next to each other can be moved at once."""
        if not gone:
            return []
        for row in gone:
            row.left = True
        count = sum(not row.left for row in self.running)
        free = [slot for slot, row in enumerate(self.running[:count]) if row.left]
        last = [slot for slot, row in enumerate(self.running) if slot >= count and not row.left]
        moves = list(zip(last, free, strict=True))
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
        with suppress(InvalidStateError):  # the client left a moment ago
            row.request.future.set_result(completion)
