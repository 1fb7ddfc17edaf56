"""Chooses a step's tokens where a row wants more than the most likely one: penalties, sampling, beams."""

from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from snapcap.models.choice.penalties import ban_repeated_ngrams, penalise_repetition
from snapcap.models.choice.sampling import sample
from snapcap.models.dimensions import MAX_BEAMS, GenerationConfig
from snapcap.models.regions import beam_search
from snapcap.models.regions.state.beams import BeamState
from snapcap.models.regions.state.kv_cache import DecodeState
from snapcap.models.regions.state.reorder import RowMoves
from snapcap.models.regions.table import RegionFunction
from snapcap.warmup.runtime.slot_request import Needs, SlotRequest


class TokenChoice:
    """Works on the first slots of a decode state, after the regions have left the greedy tokens there.

    What only beams and penalties need is allocated when a row asks for them first; until then it costs nothing.
    """

    def __init__(self, state: DecodeState, generation: GenerationConfig, vocabulary: int) -> None:
        self._state = state
        self._generation = generation
        self._vocabulary = vocabulary
        self._used = False
        self._views: dict[int, tuple[Tensor, ...]] = {}

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

    def apply(self, logits: Tensor, rows: int, needs: Needs, select: RegionFunction) -> Tensor:
        """Penalties and beams, by launches alone: what the greedy tokens are replaced with.

        Args:
            logits: [rows, V].
            select: what runs the region of beams at this bucket.

        Returns:
            The scores [rows, V] fp32 that sampling goes on with.
        """
        scores = self._penalised(logits, rows, needs.beams) if needs.penalties else logits.float()
        if needs.beams:
            most, ends = min(MAX_BEAMS, rows), len(self._generation.eos_ids)
            if ends > most:  # more than the compiled region looks at
                select = partial(beam_search.select, per_row=most + ends)
            parents = select(scores, self._normalised[needs.penalties], *self._select_inputs(rows))
            if not parents.is_cuda:
                self._moves.move(parents, self._state.positions[:rows])
        else:
            self._record(rows)
        return scores

    def _select_inputs(self, rows: int) -> tuple[Tensor, ...]:
        """All but the scores. They are the same at every step, so that a CPU need not make the views again."""
        if rows not in self._views:
            state = self._state
            own = (state.tokens[:rows], state.positions[:rows], state.forced[:rows], self._ends)
            self._views[rows] = (*own, state.key, state.value, *self.beams.inputs(rows))
        return self._views[rows]

    def _penalised(self, logits: Tensor, rows: int, with_beams: bool) -> Tensor:
        state, beams = self._state, self.beams
        tokens, positions = state.tokens[:rows], state.positions[:rows]
        penalty, ngrams = beams.penalty[:rows], beams.ngrams[:rows]
        scores = logits.to(torch.float32, copy=True)
        searched = beams.inside[:rows, :1]
        if with_beams:  # transformers changes a beam's log-probabilities, and a lone row's logits
            scores = torch.where(searched, scores.log_softmax(dim=-1), scores)
        sequences = beams.sequences[0, :rows, : state.cache_length]
        penalise_repetition(scores, sequences, positions, penalty)
        ban_repeated_ngrams(scores, sequences, positions, ngrams)
        free = state.forced[:rows].gather(1, positions.unsqueeze(1)).squeeze(1) < 0
        chosen = free & ((penalty != 1) | (ngrams > 0)) & ~searched.squeeze(1)
        tokens.copy_(torch.where(chosen, scores.argmax(dim=-1), tokens))
        return scores

    def sample(self, scores: Tensor, rows: int, needs: Needs) -> None:
        """Replace the greedy token of each row that samples. Scores: logits [rows, V], or those penalised."""
        state = self._state
        sample(
            scores,
            state.tokens[:rows],
            state.positions[:rows],
            state.forced[:rows],
            state.uniforms[:rows],
            state.temperature[:rows],
            state.top_k[:rows],
            state.top_p[:rows],
        )
        if needs.penalties:
            self._record(rows)

    def _record(self, rows: int) -> None:
        """Tokens that the rows hold from now on."""
        state = self._state
        at = state.positions[:rows].unsqueeze(1)
        self.beams.sequences[0, :rows].scatter_(1, at, state.tokens[:rows].unsqueeze(1))
