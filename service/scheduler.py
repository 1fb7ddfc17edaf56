"""Which requests wait, which run in which slot, and when they leave. Pure Python, no torch.

Continuous batching: between two decode steps waiting requests take free slots. Running rows always fill the
slots from 0 without a gap, so the smallest bucket that holds them is the one to run.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from service.errors import DeadlineExceeded, EngineFailed, InvalidOption, NotReady, Overloaded, PromptTooLong
from service.request import CaptionRequest, Completion, FinishReason
from warmup.buckets import BucketTable

Clock = Callable[[], float]


@dataclass(frozen=True)
class Limits:
    """What the caches hold: positions a row (the start token takes the first), tokens generated when a request
    names no number, and the ends."""

    cache_length: int
    default_new_tokens: int
    eos_ids: frozenset[int]

    @property
    def max_prompt_tokens(self) -> int:
        """A prompt leaves at least one position to generate into."""
        return self.cache_length - 2

    def check(self, prompt_tokens: int, wanted: int | None) -> None:
        """Refuse a request that the caches cannot hold, before it costs anything.

        Raises:
            PromptTooLong: no position is left to generate into.
            InvalidOption: ``max_new_tokens`` is more than what is left after the prompt.
        """
        if prompt_tokens > self.max_prompt_tokens:
            raise PromptTooLong(
                f"The prompt has {prompt_tokens} tokens; send at most {self.max_prompt_tokens} tokens."
            )
        room = self._room(prompt_tokens)
        if wanted is not None and wanted > room:
            raise InvalidOption("max_new_tokens", f"be at most {room}, what the model holds after the prompt")

    def new_tokens(self, prompt_tokens: int, wanted: int | None) -> int:
        """Tokens to generate: what is wanted, or the default, as far as the cache reaches."""
        return min(wanted or self.default_new_tokens, self._room(prompt_tokens))

    def _room(self, prompt_tokens: int) -> int:
        # As transformers' max_length, which also counts the start token. One token more would have no position
        # of its own: it would take the prompt's last token, or the random number, of the position before it.
        return self.cache_length - 1 - prompt_tokens


@dataclass(eq=False)
class Running:
    """A request in a slot."""

    request: CaptionRequest
    limit: int
    submitted: float
    admitted: float
    encode_s: float = 0.0
    prompt_left: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    steps: int = 0  # decode steps launched for it
    left: bool = False  # its slot is another's

    @property
    def samples(self) -> bool:
        return self.request.params.temperature > 0


@dataclass(frozen=True)
class _Waiting:
    request: CaptionRequest
    submitted: float


class Scheduler:
    """A bounded queue in front of the slots.

    ``submit``, ``close`` and ``wake`` are called from any thread, the rest by the device thread, which also may
    replace ``table`` by a larger one between two steps.
    """

    def __init__(self, table: BucketTable, limits: Limits, capacity: int, clock: Clock = time.monotonic) -> None:
        self.table = table
        self.limits = limits
        self.capacity = capacity
        self.running: list[Running] = []
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._woken = False
        self._finished: deque[float] = deque(maxlen=32)

    @property
    def depth(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def submit(self, request: CaptionRequest) -> None:
        """Queue a request.

        Raises:
            Overloaded: the queue is full; carries when to try again.
            NotReady: the engine has stopped.
        """
        with self._changed:
            if self._closed:
                raise NotReady("draining")
            if len(self._waiting) >= self.capacity:
                raise Overloaded(self._retry_after())
            self._waiting.append(_Waiting(request, self._clock()))
            self._changed.notify()

    def wait(self) -> None:
        """Sleep until there is a request to serve, or ``wake`` or ``close`` was called."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.running or self._closed or self._woken)
            self._woken = False

    def wake(self) -> None:
        """Make the next (or the present) ``wait`` return."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

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
        with self._changed:
            kept = deque(entry for entry in self._waiting if not self._is_lost(entry.request, now))
            self._waiting = kept
        return self._compact([row for row in self.running if self._is_lost(row.request, now)])

    def admit(self) -> list[Running]:
        """Give waiting requests the next free slots, first come first served; they run from now on.

        The first of them is in slot ``len(running) - len(admitted)``.
        """
        with self._changed:
            free = self.table.largest.size - len(self.running)
            count = self.table.admit(min(len(self._waiting), free)) if self._waiting and free else 0
            entries = [self._waiting.popleft() for _ in range(count)]
        now = self._clock()
        admitted = [
            Running(
                request=entry.request,
                limit=self.limits.new_tokens(len(entry.request.prompt_ids), entry.request.params.max_new_tokens),
                submitted=entry.submitted,
                admitted=now,
                prompt_left=len(entry.request.prompt_ids),
            )
            for entry in entries
        ]
        self.running += admitted
        return admitted

    def needs_step(self) -> bool:
        """Whether a row may still be without its last token once the steps that were launched are through."""
        return any(row.steps < len(row.request.prompt_ids) + row.limit for row in self.running)

    def launched(self) -> list[Running]:
        """Count a step that the device has been given for all running rows; returns these, in slot order."""
        for row in self.running:
            row.steps += 1
        return list(self.running)

    def advance(self, rows: Sequence[Running], tokens: Sequence[int], backend: str) -> list[tuple[int, int]]:
        """Take the tokens of a step, one for each row that was running when it was launched, and complete the rows
        that end with it. A row that has left since then is passed over.

        Returns the moves (source slot, target slot) that close the gaps among running rows.
        """
        finished = []
        for row, token in zip(rows, tokens, strict=True):
            if row.left:
                continue
            if row.prompt_left:
                row.prompt_left -= 1
                continue
            if token in self.limits.eos_ids:
                row.finish_reason = "stop"
            else:
                row.tokens.append(token)
                if row.request.on_token is not None:
                    row.request.on_token(token)
                if len(row.tokens) >= row.limit:
                    row.finish_reason = "length"
            if row.finish_reason is not None:
                finished.append(row)
        now = self._clock()
        for row in finished:
            self._complete(row, backend, now)
        return self._compact(finished)

    def fail_running(self, error: Exception) -> None:
        """Every running row fails; its slot is free. What waits is kept."""
        for row in self.running:
            row.left = True
            _set_exception(row.request, error)
        self.running = []

    def fail_all(self) -> None:
        """Nobody will serve any more: everything that runs or waits fails, and nothing is taken in."""
        self.close()
        with self._changed:
            waiting, self._waiting = self._waiting, deque()
        for entry in waiting:
            _set_exception(entry.request, EngineFailed())
        self.fail_running(EngineFailed())

    def _is_lost(self, request: CaptionRequest, now: float) -> bool:
        if request.future.cancelled():
            return True
        if now < request.deadline:
            return False
        _set_exception(request, DeadlineExceeded())
        return True

    def _compact(self, gone: list[Running]) -> list[tuple[int, int]]:
        """Fill each freed slot with one of the last running rows, so that rows stay contiguous."""
        for row in gone:
            row.left = True
        count = len(self.running) - len(gone)
        free = [slot for slot, row in enumerate(self.running[:count]) if row.left]
        last = [slot for slot, row in enumerate(self.running) if slot >= count and not row.left]
        moves = list(zip(reversed(last), free, strict=True))
        for source, target in moves:
            self.running[target] = self.running[source]
        del self.running[count:]
        return moves

    def _complete(self, row: Running, backend: str, now: float) -> None:
        completion = Completion(
            tokens=tuple(row.tokens),
            finish_reason=row.finish_reason or "stop",
            backend=backend,
            queue_s=row.admitted - row.submitted,
            encode_s=row.encode_s,
            decode_s=now - row.admitted - row.encode_s,
        )
        self._finished.append(now)
        with suppress(InvalidStateError):  # the client left at this very moment
            row.request.future.set_result(completion)

    def _retry_after(self) -> float:
        """Seconds until a full queue has gone at the rate of the last completions; 1 when that is not known."""
        if len(self._finished) < 2 or self._finished[-1] <= self._finished[0]:
            return 1.0
        rate = (len(self._finished) - 1) / (self._finished[-1] - self._finished[0])
        return min(max(self.capacity / rate, 1.0), 60.0)


def _set_exception(request: CaptionRequest, error: Exception) -> None:
    with suppress(InvalidStateError):  # cancelled meanwhile
        request.future.set_exception(error)
