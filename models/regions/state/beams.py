"""Static buffers of rows that are beams, or whose tokens so far are looked at: indexed by slot, as the K/V caches.

Allocated once, and only when the first request asks for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from snapcap.models.dimensions import MAX_BEAMS

PENALISE_INPUTS = ("penalty", "ngrams", "inside", "sequences")
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
class BeamState:
    """What a slot holds beside its caches. L is the cache length, M the beams of a group at most.

    A group is the rows of one request, in any slots. Each of its rows knows all of them, so that each can work out
    the whole group's choice and keep its own part of it.
    """

    members: Tensor  # [slots, M] int64: the slots of the row's group, by rank; places past the group hold any slot
    inside: Tensor  # [slots, M] bool: that place is one of the group's; all False where the row is no beam
    ranks: Tensor  # [slots, 2] int64: the row's own place, and the group's last
    lasts: Tensor  # [slots] int64: position of the last token that may be generated
    divisors: Tensor  # [slots, 2, L] fp32: by position, of a hypothesis that ends there, and of what may come
    limits: Tensor  # [slots] fp32: a worst finished score above it ends the search; inf: none does
    scores: Tensor  # [slots] fp32: log-probability of the row's tokens
    finished: Tensor  # [slots] fp32: score of the finished hypothesis of the row's rank; -inf without one
    sequences: (
        Tensor  # [2, slots, L + 1] int64: the rows' tokens, and finished hypotheses, whose last is their length
    )
    outcomes: Tensor  # [slots, L + 1] int64: the best hypothesis, last its length, which is 0 until the search ends
    penalty: Tensor  # [slots] fp32: of repetition; 1 is none
    ngrams: Tensor  # [slots] int64: size of the n-grams that must not repeat; 0 is none

    @classmethod
    def allocate(cls, slots: int, cache_length: int, device: torch.device) -> "BeamState":
        """No row is a beam yet."""
        beams = min(MAX_BEAMS, slots)

        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def real(*shape: int, fill: float = 0.0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.float32, device=device)

        return cls(
            members=whole(slots, beams),
            inside=torch.zeros(slots, beams, dtype=torch.bool, device=device),
            ranks=whole(slots, 2),
            lasts=whole(slots),
            divisors=real(slots, 2, cache_length, fill=1.0),
            limits=real(slots),
            scores=real(slots),
            finished=real(slots),
            sequences=whole(2, slots, cache_length + 1),
            outcomes=whole(slots, cache_length + 1),
            penalty=real(slots, fill=1.0),
            ngrams=whole(slots),
        )

    @property
    def slots(self) -> int:
        return self.members.shape[0]

    @property
    def cache_length(self) -> int:
        return self.outcomes.shape[1] - 1

    def inputs(self, names: Sequence[str], rows: int) -> tuple[Tensor, ...]:
        """Buffers by name for the first ``rows`` slots; of ``sequences``, whose slots are not first, all."""
        return tuple(self.sequences if name == "sequences" else getattr(self, name)[:rows] for name in names)

    def start(self, slots: slice, start_id: int) -> None:
        """Rows at their first token, greedy or sampled, without penalties."""
        self.inside[slots] = False
        self.penalty[slots] = 1.0
        self.ngrams[slots] = 0
        self.sequences[0, slots, 0] = start_id

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
        beams, device = len(slots), self.members.device
        target = torch.tensor(slots).to(device, non_blocking=True)

        def put(buffer: Tensor, value: Tensor) -> None:
            buffer.index_copy_(0, target, value.to(device, non_blocking=True))

        padding = [slots[0]] * (self.members.shape[1] - beams)
        put(self.members, torch.tensor([[*slots, *padding]] * beams))
        put(self.inside, (torch.arange(self.members.shape[1]) < beams).expand(beams, -1))
        put(self.ranks, torch.stack((torch.arange(beams), torch.full((beams,), beams - 1)), dim=1))
        put(self.lasts, torch.full((beams,), prompt_length + new_tokens - 1))
        far = early_stopping == "never" and length_penalty > 0
        table = _divisors(self.cache_length, prompt_length, new_tokens, length_penalty, far)
        put(self.divisors, table.expand(beams, -1, -1))
        put(self.limits, torch.full((beams,), float("-inf") if early_stopping is True else float("inf")))
        # All beams begin alike: only the first one's continuations count.
        put(self.scores, torch.tensor([0.0] + [-1e9] * (beams - 1)))
        put(self.finished, torch.full((beams,), float("-inf")))
        # A search that finds nothing, as all is banned, ends all the same: an outcome has a length.
        self.sequences[1, :, -1].index_fill_(0, target, prompt_length)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy what each source slot holds into its target slot; no slot is both. Groups follow their rows."""
        device = self.members.device
        source = torch.tensor(sources).to(device, non_blocking=True)
        target = torch.tensor(targets).to(device, non_blocking=True)
        for each in fields(self):
            if each.name not in ("sequences", "outcomes"):
                buffer = getattr(self, each.name)
                buffer.index_copy_(0, target, buffer.index_select(0, source))
        self.sequences.index_copy_(1, target, self.sequences.index_select(1, source))
        places = torch.arange(self.slots, device=device).index_copy_(0, source, target)
        self.members.copy_(places[self.members])


def _divisors(cache_length: int, prompt_length: int, new_tokens: int, length_penalty: float, far: bool) -> Tensor:
    """[2, L] fp32, by the position of the last token: the length that is generated with it, to the power of the
    penalty; and the length at which the best that may still come is expected, the last one if that is ``far``."""
    lengths = [max(position + 1 - prompt_length, 1) for position in range(cache_length)]
    now = [_power(length, length_penalty) for length in lengths]
    later = [_power(new_tokens, length_penalty)] * cache_length if far else now
    return torch.tensor([now, later], dtype=torch.float32)


def _power(length: int, exponent: float) -> float:
    """Within what fp32 can divide a score by."""
    try:
        return min(max(float(length**exponent), 1e-30), 1e30)
    except OverflowError:
        return 1e30
