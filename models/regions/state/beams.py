"""Static buffers of rows that are beams, or whose tokens so far are looked at: indexed by slot, as the K/V caches.

Allocated once, and only when the first request asks for them. No torch.
"""

from collections.abc import Sequence
from dataclasses import field, fields
from functools import cached_property
from typing import Any, Generic, Literal

import numpy as np

from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import MAX_BEAMS
from snapcap.models.memory.memory import B, CopySlots, Memory

PENALISE_INPUTS = ("penalised", "penalty", "ngrams", "endings", "firsts", "inside", "sequences")
SELECT_INPUTS = (
    "members",
    "inside",
    "ranks",
    "lasts",
    "divisors",
    "limits",
    "scores",
    "finished",
    "sequences",
    "outcomes",
)


@dataclass(frozen=True)
class RowStart:
    """How a row's tokens are chosen. ``begun``: those that it has. ``first``: the position of the first that is
    chosen. ``least``: the position before which no end comes. ``end_growth``: after how many tokens, and by what
    factor, ends become likelier with each."""

    begun: Sequence[int]
    first: int
    penalised: bool = False
    penalty: float = 1.0
    ngrams: int = 0
    least: int = 0
    end_growth: tuple[int, float] | None = None

    def endings(self, cache_length: int) -> "np.ndarray[Any, Any]":
        """[L] fp32, as `BeamState` has it."""
        table = np.zeros(cache_length, np.float32)
        if self.end_growth is not None:
            start, factor = self.end_growth
            begin = min(start + len(self.begun), cache_length)
            table[begin:] = [_power(factor, steps) - 1 for steps in range(cache_length - begin)]
        table[: self.least] = float("-inf")
        return table


@dataclass(frozen=True)
class BeamState(Generic[B]):
    """What a slot holds beside its caches. L is the cache length, M the beams of a group at most.

    A group is the rows of one request, in any slots. Each of its rows knows all of them, so that each can work out
    the whole group's choice and keep its own part of it.
    """

    memory: Memory[B]
    slots: int
    cache_length: int
    members: B  # [slots, M] int64: the slots of the row's group, by rank; places past the group hold any slot
    inside: B  # [slots, M] bool: that place is one of the group's; all False where the row is no beam
    ranks: B  # [slots, 2] int64: the row's own place, and the group's last
    lasts: B  # [slots] int64: position of the last token that may be generated
    divisors: B  # [slots, 2, L] fp32: by position, of a hypothesis that ends there, and of what may come
    limits: B  # [slots] fp32: a worst finished score above it ends the search; inf: none does
    scores: B  # [slots] fp32: log-probability of the row's tokens
    finished: B  # [slots] fp32: score of the finished hypothesis of the row's rank; -inf without one
    sequences: B  # [2, slots, L + 1] int64: the rows' tokens, and finished hypotheses, whose last is their length
    outcomes: B  # [slots, L + 1] int64: the best hypothesis, last its length, which is 0 until the search ends
    penalised: B  # [slots] bool: a token is chosen by the scores that the settings below, or a checkpoint, change
    penalty: B  # [slots] fp32: of repetition; 1 is none
    ngrams: B  # [slots] int64: size of the n-grams that must not repeat; 0 is none
    endings: B  # [slots, L] fp32: by position, how much of its size an end's score grows by; -inf: no end comes
    firsts: B  # [slots] int64: position of the first token that is chosen
    # The groups by slot, on the host: so a move needs not look on the device whose members have moved.
    _groups: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def allocate(cls, slots: int, cache_length: int, memory: Memory[B]) -> "BeamState[B]":
        """No row is a beam yet."""
        beams = min(MAX_BEAMS, slots)

        def whole(*shape: int) -> B:
            return memory.zeros("int64", shape)

        def real(*shape: int) -> B:
            return memory.zeros("float32", shape)

        state = cls(
            memory=memory,
            slots=slots,
            cache_length=cache_length,
            members=whole(slots, beams),
            inside=memory.zeros("bool", (slots, beams)),
            ranks=whole(slots, 2),
            lasts=whole(slots),
            divisors=real(slots, 2, cache_length),
            limits=real(slots),
            scores=real(slots),
            finished=real(slots),
            sequences=whole(2, slots, cache_length + 1),
            outcomes=whole(slots, cache_length + 1),
            penalised=memory.zeros("bool", (slots,)),
            penalty=real(slots),
            ngrams=whole(slots),
            endings=real(slots, cache_length),
            firsts=whole(slots),
        )
        everywhere = range(slots)
        memory.write(state.divisors, everywhere, np.ones((slots, 2, cache_length), np.float32))
        memory.write(state.penalty, everywhere, np.ones(slots, np.float32))
        return state

    def inputs(self, names: Sequence[str], rows: int) -> tuple[B, ...]:
        """Buffers by name for the first ``rows`` slots; of ``sequences``, whose slots are not first, all."""
        return tuple(
            self.sequences if name == "sequences" else self.memory.view(getattr(self, name), slice(rows))
            for name in names
        )

    def start(self, slots: range, rows: "Sequence[RowStart]") -> None:
        """Rows at their first token, greedy or sampled, each with its settings."""
        for slot in slots:
            self._groups.pop(slot, None)
        self._write("inside", slots, np.zeros((len(slots), self._beams), np.bool_))
        self._write("penalised", slots, np.array([row.penalised for row in rows]))
        self._write("penalty", slots, np.array([row.penalty for row in rows], np.float32))
        self._write("ngrams", slots, np.array([row.ngrams for row in rows]))
        self._write("firsts", slots, np.array([row.first for row in rows]))
        self._write("endings", slots, np.stack([row.endings(self.cache_length) for row in rows]))
        held = np.zeros((len(rows), self.cache_length + 1), np.int64)
        for place, row in enumerate(rows):
            held[place, : len(row.begun)] = row.begun
        self.memory.write(self.memory.view(self.sequences, 0), slots, held)

    def group(
        self,
        slots: Sequence[int],
        prompt_length: int,
        new_tokens: int,
        length_penalty: float,
        early_stopping: bool | Literal["never"],
    ) -> None:
        """Make rows that were started, in these slots, the beams of one request.

        Args:
            prompt_length: tokens before generation, the start token included.
            new_tokens: tokens to generate at most.
            early_stopping: as `_beam_search` of transformers has it.
        """
        beams = len(slots)

        def put(name: str, value: float | np.ndarray[Any, Any], dtype: Any = np.int64) -> None:
            """The same in every row."""
            self._write(name, slots, np.array([value] * beams, dtype))

        self._join(slots)
        put("inside", np.arange(self._beams) < beams, np.bool_)
        self._write("ranks", slots, np.array([[rank, beams - 1] for rank in range(beams)]))
        put("lasts", prompt_length + new_tokens - 1)
        far = early_stopping == "never" and length_penalty > 0
        table = _divisors(self.cache_length, prompt_length, new_tokens, length_penalty, far)
        put("divisors", table, np.float32)
        put("limits", float("-inf") if early_stopping is True else float("inf"), np.float32)
        # All beams begin alike: only the first one's continuations count.
        self._write("scores", slots, np.array([0.0] + [-1e9] * (beams - 1), np.float32))
        put("finished", float("-inf"), np.float32)
        # A search that finds nothing, as all is banned, ends all the same: an outcome has a length.
        lengths = self.memory.view(self.sequences, 1, slice(None), self.cache_length)
        self.memory.write(lengths, slots, np.full(beams, prompt_length))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy what each source slot holds into its target slot; no slot is both. Groups follow their rows."""
        self._copy(sources, targets)
        to = dict(zip(sources, targets, strict=True))
        for target in targets:
            self._groups.pop(target, None)
        for group in {self._groups[source] for source in sources if source in self._groups}:
            for slot in group:
                self._groups.pop(slot, None)
            self._join([to.get(slot, slot) for slot in group])

    def _join(self, slots: Sequence[int]) -> None:
        """These rows are a group, in this order."""
        self._groups.update(dict.fromkeys(slots, tuple(slots)))
        padding = [slots[0]] * (self._beams - len(slots))
        self._write("members", slots, np.array([[*slots, *padding]] * len(slots)))

    def _write(self, name: str, slots: Sequence[int], values: "np.ndarray[Any, Any]") -> None:
        self.memory.write(getattr(self, name), slots, values)

    @property
    def _beams(self) -> int:
        return min(MAX_BEAMS, self.slots)

    @cached_property
    def _copy(self) -> CopySlots:
        """All but outcomes, which a row's next step writes anew."""
        names = [each.name for each in fields(self) if each.name in (*PENALISE_INPUTS, *SELECT_INPUTS)]
        return self.memory.copier(
            [(getattr(self, name), int(name == "sequences")) for name in names if name != "outcomes"]
        )


def _divisors(
    cache_length: int, prompt_length: int, new_tokens: int, length_penalty: float, far: bool
) -> "np.ndarray[Any, Any]":
    """[2, L] fp32, by the position of the last token: the length that is generated with it, to the power of the
    penalty; and the length at which the best that may still come is expected, the last one if that is ``far``."""
    lengths = [max(position + 1 - prompt_length, 1) for position in range(cache_length)]
    now = [_power(length, length_penalty) for length in lengths]
    later = [_power(new_tokens, length_penalty)] * cache_length if far else now
    return np.array([now, later], np.float32)


def _power(base: float, exponent: float) -> float:
    """Within what fp32 can divide or multiply a score by."""
    try:
        return min(max(float(base**exponent), 1e-30), 1e30)
    except OverflowError:
        return 1e30
