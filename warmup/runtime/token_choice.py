"""Chooses a step's tokens where a row wants more than the most likely one: penalties, sampling, beams."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from snapcap.models.dimensions import MAX_BEAMS, GenerationConfig
from snapcap.models.regions.choice import beam_search
from snapcap.models.regions.names import BEAMS, PENALTIES, SAMPLING
from snapcap.models.regions.state.beams import BeamState
from snapcap.models.regions.state.kv_cache import DecodeState
from snapcap.models.regions.state.reorder import RowMoves
from snapcap.models.regions.table import RegionFunction, choice_inputs
from snapcap.warmup.runtime.slot_request import Needs, SlotRequest


class Choice(NamedTuple):
    """What runs a bucket's regions that choose tokens, each in those steps alone that need it."""

    penalties: RegionFunction
    sampling: RegionFunction
    beams: RegionFunction


class TokenChoice:
    """Works on the first slots of a decode state, after the regions have left the greedy tokens there.

    What only beams and penalties need is allocated when a row asks for them first; until then it costs nothing.
    """

    def __init__(self, state: DecodeState, generation: GenerationConfig, vocabulary: int) -> None:
        self._state = state
        self._generation = generation
        self._vocabulary = vocabulary
        self._used = False
        self._views: dict[tuple[str, int], tuple[Tensor, ...]] = {}

    @cached_property
    def beams(self) -> BeamState:
        """The buffers, zeroed."""
        self._used = True
        state = self._state
        return BeamState.allocate(state.slots, state.cache_length, state.tokens.device)

    @cached_property
    def _ends(self) -> Tensor:
        ends = torch.zeros(self._vocabulary, dtype=torch.bool)
        ends[list(self._generation.eos_ids)] = True
        return ends.to(self._state.tokens.device)

    @cached_property
    def _moves(self) -> RowMoves:
        return RowMoves(self._state.key, self._state.value)

    @cached_property
    def _normalised(self) -> tuple[Tensor, ...]:
        """Whether scores are log-probabilities already, by whether there are penalties: [1] bool each."""
        return torch.tensor([[False], [True]]).to(self._state.tokens.device).unbind()

    def start(self, first_slot: int, rows: Sequence[SlotRequest]) -> None:
        """Requests take the slots from the first one on, a slot each."""
        if not (self._used or any(row.params.penalised or row.params.searches for row in rows)):
            return
        beams = self.beams
        beams.start(slice(first_slot, first_slot + len(rows)), self._generation.start_id)
        for slot, row in enumerate(rows, start=first_slot):
            if row.params.penalised:
                beams.penalty[slot] = row.params.repetition_penalty
                beams.ngrams[slot] = row.params.no_repeat_ngram_size

    def group(self, slots: Sequence[int], row: SlotRequest) -> None:
        """What the first of these slots holds is the others' too; together they are a search."""
        first, *others = slots
        if others:
            self._state.move([first] * len(others), others)
            self.beams.move([first] * len(others), others)
        params = row.params
        self.beams.group(slots, 1 + len(row.prompt), row.new_tokens, params.length_penalty, params.early_stopping)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Rows have moved."""
        if self._used:
            self.beams.move(sources, targets)

    def apply(self, logits: Tensor, rows: int, needs: Needs, choice: Choice) -> Tensor:
        """Penalties and beams, by launches alone: what the greedy tokens are replaced with.

        Args:
            logits: [rows, V] fp32.
            choice: what runs the regions at this bucket.

        Returns:
            The scores [rows, V] fp32 that sampling goes on with.
        """
        scores = logits
        if needs.penalties:
            scores = choice.penalties(logits, *self._inputs(PENALTIES, rows))
        if needs.beams:
            most, ends = min(MAX_BEAMS, rows), len(self._generation.eos_ids)
            select = choice.beams
            if ends > most:  # more than the compiled region looks at
                select = partial(beam_search.select, per_row=most + ends)
            parents = select(scores, self._normalised[needs.penalties], *self._inputs(BEAMS, rows))
            if not parents.is_cuda:
                self._moves.move(parents, self._state.positions[:rows])
        return scores

    def sample(self, scores: Tensor, rows: int, choice: Choice) -> None:
        """Replace the greedy token of each row that samples. Scores: logits [rows, V], or those penalised."""
        choice.sampling(scores, *self._inputs(SAMPLING, rows))

    def _inputs(self, region: str, rows: int) -> tuple[Tensor, ...]:
        """What a region takes after the scores. They are the same at every step, so that a CPU need not make the
        views again."""
        if (region, rows) not in self._views:
            self._views[region, rows] = choice_inputs(region, self._state, self.beams, self._ends, rows)
        return self._views[region, rows]
