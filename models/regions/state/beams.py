"""Holds static buffers, indexed by slot, of rows that are beams or whose choice depends on their tokens so far.

The buffers are allocated once, when the first request needs them. Imports no torch.
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
    """The settings by which a row's tokens are chosen.

    begun: the tokens that the row has, the start token included.
    first: the position of the first token that is chosen.
    ngrams: the size of the n-grams that must not repeat; 0 is none.
    least: the position before which no end comes.
    end_growth: ``(start, factor)``. The scores of end tokens grow once ``start`` tokens are generated: n tokens
        later by ``factor**n - 1`` times their absolute value.
    """

    begun: Sequence[int]
    first: int
    penalised: bool = False
    penalty: float = 1.0
    ngrams: int = 0
    least: int = 0
    end_growth: tuple[int, float] | None = None

    def endings(self, cache_length: int) -> "np.ndarray[Any, Any]":
        """Returns the row of `BeamState.endings`: [L] fp32."""
        table = np.zeros(cache_length, np.float32)
        if self.end_growth is not None:
            start, factor = self.end_growth
            begin = min(start + len(self.begun), cache_length)
            table[begin:] = [_power(factor, steps) - 1 for steps in range(cache_length - begin)]
        table[: self.least] = float("-inf")
        return table


@dataclass(frozen=True)
class BeamState(Generic[B]):
    """The buffers of a slot beside its caches. L is the cache length, M the greatest number of beams in a group.

    A group is the rows of one request, in any slots. Each row knows all rows of its group, so it can compute the
    whole group's choice and keep its own part.
    """

    memory: Memory[B]
    slots: int
    cache_length: int
    members: B  # [slots, M] int64: the slots of the row's group, by rank; places behind the group hold any slot
    inside: B  # [slots, M] bool: the place belongs to the group; all False if the row is no beam
    ranks: B  # [slots, 2] int64: the row's own rank, and the group's last rank
    lasts: B  # [slots] int64: position of the last token that may be generated
    # [slots, 2, L] fp32: by position, the divisor of a hypothesis that ends there, and of the best still possible
    divisors: B
    limits: B  # [slots] fp32: the search ends if its worst finished score is above this; inf never ends it
    scores: B  # [slots] fp32: log-probability of the row's tokens
    finished: B  # [slots] fp32: score of the group's finished hypothesis with the row's rank; -inf without one
    # [2, slots, L + 1] int64: the rows' tokens, and finished hypotheses, whose last number is their length
    sequences: B
    # [slots, L + 1] int64: the best hypothesis; the last number is its length, or 0 until the search ends
    outcomes: B
    # [slots] bool: the row's token is chosen by scores that the settings below, or the checkpoint's rules, change
    penalised: B
    penalty: B  # [slots] fp32: repetition penalty; 1 is none
    ngrams: B  # [slots] int64: size of the n-grams that must not repeat; 0 is none
    # [slots, L] fp32: by position, growth of an end's score as a share of its absolute value; -inf: no end
    endings: B
    firsts: B  # [slots] int64: position of the first token that is chosen
    # The slots of each group, by each slot of it. The host keeps them, so a move need not read `members` from the
    # device.
    _groups: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def allocate(cls, slots: int, cache_length: int, memory: Memory[B]) -> "BeamState[B]":
        """Returns buffers in which no row is a beam or penalised."""
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
        """Returns buffers by name, as views of the first ``rows`` slots. ``sequences`` is returned whole, because
        its slots are in its second dimension."""
        return tuple(
            self.sequences if name == "sequences" else self.memory.view(getattr(self, name), slice(rows))
            for name in names
        )

    def start(self, slots: range, rows: "Sequence[RowStart]") -> None:
        """Starts rows that are greedy or sampled, each with its settings; beams are started too, before `group`."""
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
        """Makes started rows, in these slots, the beams of one request.

        Args:
            prompt_length: number of tokens before generation, the start token included.
            new_tokens: greatest number of tokens to generate.
            early_stopping: as in `_beam_search` of transformers.
        """
        beams = len(slots)

        def put(name: str, value: float | np.ndarray[Any, Any], dtype: Any = np.int64) -> None:
            """Writes the same value for every row of the group."""
            self._write(name, slots, np.array([value] * beams, dtype))

        self._join(slots)
        put("inside", np.arange(self._beams) < beams, np.bool_)
        self._write("ranks", slots, np.array([[rank, beams - 1] for rank in range(beams)]))
        put("lasts", prompt_length + new_tokens - 1)
        far = early_stopping == "never" and length_penalty > 0
        table = _divisors(self.cache_length, prompt_length, new_tokens, length_penalty, far)
        put("divisors", table, np.float32)
        put("limits", float("-inf") if early_stopping is True else float("inf"), np.float32)
        # All beams begin with the same tokens, so only the first beam's continuations may count.
        self._write("scores", slots, np.array([0.0] + [-1e9] * (beams - 1), np.float32))
        put("finished", float("-inf"), np.float32)
        # A search that finds no hypothesis, because all tokens are banned, must end too: its outcome needs a
        # length above 0.
        lengths = self.memory.view(self.sequences, 1, slice(None), self.cache_length)
        self.memory.write(lengths, slots, np.full(beams, prompt_length))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the contents of each source slot to its target slot. No slot may be both. Groups follow their
        rows."""
        self._copy(sources, targets)
        to = dict(zip(sources, targets, strict=True))
        for target in targets:
            self._groups.pop(target, None)
        for group in {self._groups[source] for source in sources if source in self._groups}:
            for slot in group:
                self._groups.pop(slot, None)
            self._join([to.get(slot, slot) for slot in group])

    def _join(self, slots: Sequence[int]) -> None:
        """Records that these slots are a group, by rank."""
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
        """Copies all buffers except `outcomes`, which a row's next step writes anew."""
        names = [each.name for each in fields(self) if each.name in (*PENALISE_INPUTS, *SELECT_INPUTS)]
        return self.memory.copier(
            [(getattr(self, name), int(name == "sequences")) for name in names if name != "outcomes"]
        )


def _divisors(
    cache_length: int, prompt_length: int, new_tokens: int, length_penalty: float, far: bool
) -> "np.ndarray[Any, Any]":
    """Returns the divisors [2, L] fp32 of a hypothesis's score, by the position of its last token.

    The first row is the number of generated tokens to the power of the penalty. The second row is the divisor of
    the best score that is still possible: the one for ``new_tokens`` tokens if ``far``, else the same as the first
    row.
    """
    lengths = [max(position + 1 - prompt_length, 1) for position in range(cache_length)]
    now = [_power(length, length_penalty) for length in lengths]
    later = [_power(new_tokens, length_penalty)] * cache_length if far else now
    return np.array([now, later], np.float32)


def _power(base: float, exponent: float) -> float:
    """Returns ``base**exponent``, limited to [1e-30, 1e30], so that fp32 can divide or multiply a score by it."""
    try:
        return min(max(float(base**exponent), 1e-30), 1e30)
    except OverflowError:
        return 1e30
