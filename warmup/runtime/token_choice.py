"""Chooses a step's tokens where a row wants more than the most likely one: penalties, sampling, beams."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Generic, NamedTuple

import numpy as np

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import BEAMS, MAX_BEAMS, PENALTIES, SAMPLING
from snapcap.models.memory.host import RowMoves
from snapcap.models.memory.memory import B
from snapcap.models.regions.state import BeamState, DecodeState, RowStart, TokenRules
from snapcap.models.regions.table import RegionCall, choice_inputs
from snapcap.warmup.runtime.slot_request import Needs, SlotRequest


class Choice(NamedTuple):
    """Holds the callables of a bucket's regions that choose tokens. Each runs only in steps that need it."""

    penalties: RegionCall
    sampling: RegionCall
    beams: RegionCall


class TokenChoice(Generic[B]):
    """Works on the first slots of a decode state, after the regions have left the greedy tokens there.

    Buffers for beams and penalties are allocated when a row first asks for either; until then they take no memory.
    """

    def __init__(self, state: DecodeState[B], config: ModelConfig) -> None:
        self._state = state
        self._config = config
        self._generation = config.generation
        self._used = False
        self._views: dict[tuple[str, int], tuple[B, ...]] = {}

    @cached_property
    def beams(self) -> BeamState[B]:
        """The buffers, zeroed."""
        state = self._state
        beams = BeamState.allocate(state.slots, state.cache_length, state.memory)
        self._used = True  # not before there is memory for them, or each later request would fail too
        return beams

    @cached_property
    def _rules(self) -> TokenRules[B]:
        """The token rules of the checkpoint: ends, biases and suppressed tokens."""
        config, generation = self._config, self._generation
        rules = TokenRules.allocate(config.decoder.vocab_size, self._state.memory)
        image = () if generation.image_id is None else (generation.image_id,)
        rules.write(
            ends=generation.eos_ids,
            before=(*config.prefix, *image),
            biases=dict(generation.biases),
            suppressed=generation.suppressed,
            suppressed_first=generation.suppressed_first,
        )
        return rules

    @cached_property
    def _normalised(self) -> tuple[B, B]:
        """The constants False and True, [1] bool each. Either tells the beam region whether its scores are
        log-probabilities already."""
        return self._flags(np.array([False])), self._flags(np.array([True]))

    def _flags(self, values: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> B:
        memory = self._state.memory
        flags = memory.zeros("bool", values.shape)
        memory.write(flags, range(len(values)), values)
        return flags

    def start(self, first_slot: int, rows: Sequence[SlotRequest]) -> None:
        """Requests take the slots from the first one on, a slot each."""
        if self._used or any(row.params.penalised or row.params.searches for row in rows):
            self.beams.start(range(first_slot, first_slot + len(rows)), [self._row_start(row) for row in rows])

    def _row_start(self, row: SlotRequest) -> RowStart:
        generation, params = self._generation, row.params
        begun = row.begun(generation.start_id)
        # A first token that is forced is not chosen; it counts as generated.
        forced = generation.forced_bos_id is not None and not row.prompt
        return RowStart(
            begun=begun,
            first=len(begun) + forced,
            penalised=params.penalised,
            penalty=params.repetition_penalty,
            ngrams=params.no_repeat_ngram_size,
            least=len(begun) + (params.min_new_tokens or 0),
            end_growth=generation.end_growth,
        )

    def group(self, slots: Sequence[int], row: SlotRequest) -> None:
        """Make a beam search of these slots: copy the first slot's state to the others."""
        first, *others = slots
        if others:
            self._state.move([first] * len(others), others)
            self.beams.move([first] * len(others), others)
        params = row.params
        self.beams.group(slots, 1 + len(row.prompt), row.new_tokens, params.length_penalty, params.early_stopping)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move the beam state of rows from source slots to target slots."""
        if self._used:
            self.beams.move(sources, targets)

    def apply(self, logits: B, rows: int, needs: Needs, choice: Choice) -> B:
        """Penalties and beams, by launches alone: what the greedy tokens are replaced with.

        Args:
            logits: [rows, V] fp32.
            choice: what runs the regions at this bucket.

        Returns:
            The scores [rows, V] fp32 that sampling goes on with.
        """
        scores: B = logits
        if needs.penalties:
            scores = choice.penalties(logits, *self._inputs(PENALTIES, rows))
        if needs.beams:
            normalised = needs.penalties and not self._generation.renormalises
            inputs = (scores, self._normalised[normalised], *self._inputs(BEAMS, rows))
            most, ends = min(MAX_BEAMS, rows), len(self._generation.eos_ids)
            if ends <= most:
                parents: B = choice.beams(*inputs)
            else:  # more than the compiled region looks at
                from snapcap.models.layers.choice import select  # noqa: PLC0415  the module imports torch

                wider: RegionCall = partial(select, per_row=most + ends)
                parents = wider(*inputs)
            self._go_on_from(parents, rows)
        return scores

    def _go_on_from(self, parents: B, rows: int) -> None:
        """Where the host knows the parents, it copies what is to be copied; elsewhere the region has done it."""
        memory, state = self._state.memory, self._state
        known, positions = memory.array(parents), memory.array(state.positions)
        key, value = memory.array(state.key), memory.array(state.value)
        if known is not None and positions is not None and key is not None and value is not None:
            RowMoves(key, value).move(known.tolist(), positions[:rows].tolist())

    def sample(self, scores: B, rows: int, choice: Choice) -> None:
        """Replace the greedy token of each row that samples. Scores: logits [rows, V], or those penalised."""
        choice.sampling(scores, *self._inputs(SAMPLING, rows))

    def _inputs(self, region: str, rows: int) -> tuple[B, ...]:
        """Returns the inputs of a region after the scores. They are the same at every step, and are cached so that
        a CPU need not make the views again."""
        if (region, rows) not in self._views:
            self._views[region, rows] = choice_inputs(region, self._state, self.beams, self._rules, rows)
        return self._views[region, rows]
