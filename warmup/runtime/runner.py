"""Runs a captioner's regions at a bucket: encodes images into slots, and makes one decode step for all rows.

Only the device thread calls it. Buffers are allocated once; a bucket is a set of views on them, so there is
nothing to copy when the engine moves between buckets. No torch: what tensors are is the device's matter.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple

import numpy as np

from snapcap.models.config import ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import BEAMS, MAX_BEAMS, PENALTIES, SAMPLING, forced_end
from snapcap.models.memory.memory import B, move_rows
from snapcap.models.processing.packed import examples, grid_of
from snapcap.models.regions.state import BeamState, DecodeState, RowStart, TokenRules
from snapcap.models.regions.table import (
    ROWS,
    Component,
    RegionCall,
    Regions,
    choice_inputs,
    layer_inputs,
    layer_order,
    pixels_of,
)
from snapcap.warmup.plan.plan import Bucket
from snapcap.warmup.runtime.devices import Captured, Device, NoRoomError, PendingTokens, Pixels, Staging
from snapcap.warmup.runtime.model import Backend, Model
from snapcap.warmup.runtime.slot_request import GREEDY, Needs, SlotRequest


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
        """Copies each row's own K/V from its parent's row, if the host can reach these buffers. On a device whose
        buffers the host cannot reach, the region has copied them."""
        memory, state = self._state.memory, self._state
        known, positions = memory.array(parents), memory.array(state.positions)
        key, value = memory.array(state.key), memory.array(state.value)
        if known is not None and positions is not None and key is not None and value is not None:
            move_rows(key, value, known.tolist(), positions[:rows].tolist())

    def sample(self, scores: B, rows: int, choice: Choice) -> None:
        """Replace the greedy token of each row that samples. Scores: logits [rows, V], or those penalised."""
        choice.sampling(scores, *self._inputs(SAMPLING, rows))

    def _inputs(self, region: str, rows: int) -> tuple[B, ...]:
        """Returns the inputs of a region after the scores. They are the same at every step, and are cached so that
        a CPU need not make the views again."""
        if (region, rows) not in self._views:
            self._views[region, rows] = choice_inputs(region, self._state, self.beams, self._rules, rows)
        return self._views[region, rows]


class Callables(NamedTuple):
    """Holds the callables of a component's regions at a bucket, in their order, and a decoder's callables for token
    choices other than greedy."""

    regions: tuple[RegionCall, ...]
    choice: Choice | None = None


def open_callables(regions: Regions, component: Component, bucket: Bucket, backend: Backend) -> Callables:
    """The backend's callables for a component; raises what the backend raises."""
    run = tuple(backend.callable(region, bucket) for region in regions.of(component))
    if component == "encoder":
        return Callables(run)
    return Callables(run, Choice(*(backend.callable(region, bucket) for region in regions.choice)))


# A callable for each layer of each region, with all but its first input, which the one before it returns.
_Calls = list[tuple[RegionCall, tuple[B, ...]]]


@dataclass(frozen=True)
class _Launches(Generic[B]):
    """A step at one bucket, or an encode for one number of tokens, with caches, weights and ``first`` bound."""

    first: B  # tokens [B] int64; pixels [B, height, width, 3] uint8, of packed pictures [B, tokens, width, 3]
    calls: _Calls[B]
    captured: Captured[B] | None = None

    def run(self) -> B:
        return self.captured.replay() if self.captured else _run(self.first, self.calls)

    def recorded(self, device: Device[B]) -> "_Launches[B]":
        return replace(self, captured=device.record(lambda: _run(self.first, self.calls)))


@dataclass(frozen=True)
class _EncodePlan(Generic[B]):
    """The encoder at one bucket."""

    slots: B  # [B] int64
    encodes: Mapping[int, _Launches[B]]  # by the number of tokens that pictures are padded to, ascending; or only 0

    def holding(self, tokens: int) -> _Launches[B]:
        """Returns the encode of the fewest tokens that holds so many."""
        return next(encode for most, encode in self.encodes.items() if most >= tokens or not most)


@dataclass(frozen=True)
class _StepPlan(Generic[B]):
    """The decoder at one bucket."""

    rows: int
    callables: Callables
    choice: Choice
    launches: _Launches[B]
    # With penalties and beams, by what of these it does; recorded when a row needs them first.
    choices: dict[Needs, Captured[B]] = field(default_factory=dict)


class Runner(Generic[B]):
    """Static buffers and, for every bucket, the callables that work on them."""

    def __init__(self, model: Model[B], device: Device[B], images: int | None = None) -> None:
        """``device``: the one that the model's buffers are on. ``images``: the most images of an encode; None: as
        many as there are slots."""
        self.model = model
        self.device = device
        self._most_images = model.state.slots if images is None else images
        self.config, self.regions, self.state = model.config, model.regions, model.state
        self._weights = model.weights
        self._encode: dict[Bucket, _EncodePlan[B]] = {}
        self._step: dict[Bucket, _StepPlan[B]] = {}
        self._readback = device.readback(self.state.tokens)
        self._choice = TokenChoice(self.state, self.config)

    def bind(self, component: Component, bucket: Bucket, callables: Callables) -> None:
        """Run a component's bucket with these callables from now on."""
        if component == "encoder":
            self._encode[bucket] = self._encode_plan(bucket, callables)
        else:
            self._step[bucket] = self._step_plan(bucket, callables)

    def is_bound(self, component: Component, bucket: Bucket) -> bool:
        """Returns whether a component's bucket has callables."""
        return bucket in (self._encode if component == "encoder" else self._step)

    def capture(self, component: Component, bucket: Bucket) -> None:
        """Record everything a bucket launches as one CUDA graph; from now on it is replayed.

        Another bucket must have run before, since the first call of all prepares libraries. Capturing the largest
        bucket first lets the smaller ones live in its memory. Recording launches nothing, so rows may be running.
        """
        if component == "encoder":
            plan = self._encode[bucket]
            sizes = sorted(plan.encodes, reverse=True)
            encodes = {tokens: plan.encodes[tokens].recorded(self.device) for tokens in sizes}
            self._encode[bucket] = replace(plan, encodes=dict(sorted(encodes.items())))
        else:
            step = self._step[bucket]
            self._step[bucket] = replace(step, launches=step.launches.recorded(self.device))

    def run_aside(self, component: Component, bucket: Bucket) -> None:
        """Run a bucket once with its callables, between two steps of running rows, and change none of these rows.

        The images' K/V go to the scratch slot. A decode step has tokens and positions of its own, and writes only
        K/V of the last position, which no row reads before the row's own last step has written it."""
        if component == "encoder":
            vision = self.config.vision
            for picture in examples(vision.image_size, vision.token_buckets):
                self.encode(bucket, [picture] * bucket.size, None)
            return
        memory, last = self.state.memory, self.state.cache_length - 1
        own = dict(zip(ROWS, self.state.rows(ROWS, bucket.size), strict=True))
        own |= {name: memory.zeros(*memory.spec(own[name])) for name in ("tokens", "positions")}
        memory.write(own["positions"], range(bucket.size), np.full(bucket.size, last))
        _run(own["tokens"], self._calls("decoder", bucket, self._step[bucket].callables, own))

    def run_first_layers(self, component: Component, bucket: Bucket) -> None:
        """Run each region of a bucket with only its first layer, on any content of the buffers. All layers run the
        same code, so this loads all that a first run loads. The result has no meaning. No row may be running."""
        encodes = self._encode[bucket].encodes.values() if component == "encoder" else [self._step[bucket].launches]
        for each in encodes:
            _run(each.first, _first_layers(each.calls))

    def twin(self) -> "Runner[B]":
        """A runner over the same weights with zeroed buffers of its own and nothing bound: for trying things
        while rows are running here."""
        return Runner(replace(self.model, state=self.state.zeroed()), self.device, self._most_images)

    @cached_property
    def _images(self) -> tuple[B, B]:
        """The encoder's pixels and slots at the largest bucket. Smaller buckets use the first rows."""
        memory, rows = self.state.memory, self._most_images
        return memory.zeros("uint8", (rows, *self.config.vision.image_size, 3)), memory.zeros("int64", (rows,))

    @cached_property
    def _staging(self) -> Staging:
        return self.device.staging(*self._images)

    def _encode_plan(self, bucket: Bucket, callables: Callables) -> _EncodePlan[B]:
        memory, known = self.state.memory, self._encode.get(bucket)
        images, all_slots = self._images
        slots = memory.view(all_slots, slice(bucket.size)) if known is None else known.slots
        encodes: dict[int, _Launches[B]] = {}
        for region in self.regions.encoder:
            if region.tokens not in encodes:
                calls = self._calls("encoder", bucket, callables, {"slots": slots}, region.tokens)
                encodes[region.tokens] = _Launches(pixels_of(region, images, bucket.size, memory), calls)
        return _EncodePlan(slots, encodes)

    def _step_plan(self, bucket: Bucket, callables: Callables) -> _StepPlan[B]:
        if callables.choice is None:
            raise ValueError("these are an encoder's callables")
        own = dict(zip(ROWS, self.state.rows(ROWS, bucket.size), strict=True))
        launches = _Launches(own["tokens"], self._calls("decoder", bucket, callables, own))
        return _StepPlan(bucket.size, callables, callables.choice, launches)

    def _calls(
        self, component: Component, bucket: Bucket, callables: Callables, own: Mapping[str, B], tokens: int = 0
    ) -> _Calls[B]:
        """``own``: the buffers that hold a row each. ``tokens``: the number that pictures are padded to."""
        pairs = zip(self.regions.of(component), callables.regions, strict=True)
        used = [(region, call) for region, call in pairs if region.tokens == tokens]
        calls = [
            [
                (call, (*inputs, *weights))
                for inputs, weights in zip(
                    layer_inputs(region, self.state, bucket.size, own), self._weights.of(region), strict=True
                )
            ]
            for region, call in used
        ]
        return [calls[place][layer] for place, layer in layer_order([region for region, _ in used])]

    def encode(
        self, bucket: Bucket, images: Sequence[Pixels], first_slot: int | None, rows: Sequence[SlotRequest] = ()
    ) -> B:
        """Encode images [height, width, 3] into the slots ``first_slot``, ``first_slot + 1``, …; None: all of them
        into the scratch slot, where nothing is read.

        ``rows``: what goes into these slots, for models that read a text beside an image; none: no text.

        Returns what the last region does [bucket, tokens, hidden], such as the encoder's output; rows after
        ``len(images)`` are padding, whose K/V goes to the scratch slot."""
        plan, count, tokens = self._encode[bucket], len(images), 0
        slots = [] if first_slot is None else list(range(first_slot, first_slot + count))
        slots += [self.state.slots] * (bucket.size - len(slots))
        self._staging.copy(images, slots)
        self.state.write_texts(slots[:count], [row.read(self.config.generation.start_id) for row in rows])
        if self.state.grids is not None:
            grids = [grid_of(image) for image in images]
            self.state.write_grids(slots[:count], grids, [row.ahead for row in rows])
            tokens = max((rows * columns for rows, columns in grids), default=0)
        return plan.holding(tokens).run()

    def admit(self, first_slot: int, rows: Sequence[SlotRequest]) -> None:
        """Put requests at the first token that their encode has not read, and their prompts as forced tokens."""
        state, count = self.state, len(rows)
        slots = range(first_slot, first_slot + count)

        def put(name: str, values: "np.ndarray[Any, Any]") -> None:
            state.memory.write(getattr(state, name), slots, values)

        forced, generation = np.full((count, state.cache_length), -1), self.config.generation
        for place, row in enumerate(rows):
            forced[place, 1 : 1 + len(row.prompt)] = row.prompt
            if generation.forced_bos_id is not None and not row.prompt:
                forced[place, 1] = generation.forced_bos_id  # this token counts as generated
            end = generation.forced_eos_id
            if end is not None and row.params.searches:
                forced[place, len(row.prompt) + row.new_tokens] = forced_end(end)
            elif end is not None and end not in generation.eos_ids:  # a lone row stops before an end
                forced[place, len(row.prompt) + row.new_tokens] = end
        put("tokens", np.array([row.begun(generation.start_id)[row.prefilled] for row in rows]))
        put("positions", np.array([row.prefilled for row in rows]))
        put("forced", forced)
        put("temperature", np.array([row.params.temperature for row in rows], np.float32))
        if any(row.params.samples for row in rows):
            uniforms = np.zeros((count, state.cache_length), np.float32)
            for place, row in enumerate(rows):
                uniforms[place, : len(row.uniforms)] = row.uniforms
            put("uniforms", uniforms)
            put("top_k", np.array([row.params.top_k or self.config.decoder.vocab_size for row in rows]))
            top_p = np.array([row.params.top_p for row in rows], np.float32)
            put("top_p", np.maximum(top_p, np.finfo(np.float32).tiny))  # 0 is the most likely token alone
        self._choice.start(first_slot, rows)

    def group(self, slots: Sequence[int], row: SlotRequest) -> None:
        """Make slots the rows of one beam search, all of them as the first, which has been admitted."""
        self._choice.group(slots, row)

    def decode_step(self, bucket: Bucket, needs: Needs = GREEDY) -> B:
        """Advance every row of the bucket by one token and return its scores [bucket, vocabulary]: the logits, or
        what penalties and beams make of them.

        ``needs`` must name everything that one of the running rows needs."""
        plan = self._step[bucket]
        if needs.beams and self.config.generation.forced_eos_id is not None:
            needs = replace(needs, penalties=True)  # they force it
        if needs.penalties or needs.beams:
            scores = self._chosen(plan, replace(needs, sampling=False))
        else:
            scores = plan.launches.run()
        if needs.sampling:
            self._choice.sample(scores, bucket.size, plan.choice)
        return scores

    def _chosen(self, plan: _StepPlan[B], needs: Needs) -> B:
        """Run a step with penalties or beams, on CUDA as a single graph. The first such step records the graph, so
        that a start does not take longer for a server whose requests never use beams. Recording takes no compiler,
        and the step is run all the same."""
        if needs in plan.choices:
            return plan.choices[needs].replay()
        step = plan.launches
        scores = self._choice.apply(step.run(), plan.rows, needs, plan.choice)
        if step.captured is not None:
            with contextlib.suppress(NoRoomError):  # a later step may have it
                plan.choices[needs] = self.device.record(
                    lambda: self._choice.apply(_run(step.first, step.calls), plan.rows, needs, plan.choice)
                )
        return scores

    def read_tokens(self, rows: int, beams: bool = False) -> PendingTokens:
        """The last tokens of the first ``rows`` slots, as of now, to be read later on; with those of ended searches
        if rows are ``beams``."""
        return self._readback.start(rows, self._choice.beams.outcomes if beams else None)

    def tokens(self, rows: int) -> list[int]:
        """The last tokens of the first ``rows`` slots; waits for the device."""
        return self.read_tokens(rows).result()

    @property
    def gains_by_batch(self) -> bool:
        """True if an image takes less time in a large encode than in a small one, and the bucket tells the time: on
        a GPU, unless pictures may have any shape."""
        return self.device.runs_ahead and not self.config.vision.token_buckets

    @property
    def encodes_beside(self) -> bool:
        """True if ``encode`` may run in ``CpuLanes.beside`` while decode steps of other rows go on. Then it writes
        to the caches of cross-attention alone: steps write to the other caches of every slot of their bucket."""
        return self.device.lanes is not None and not self.config.decoder.reads_prompt

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move running rows (source slot, target slot) into slots that have become free."""
        if moves:
            self.move_images(moves)
            self._choice.move(*zip(*moves, strict=True))

    def move_images(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move what encodes have left in slots whose requests have not been admitted. Beams and settings that these
        slots still have are of earlier requests."""
        if moves:
            self.state.move(*zip(*moves, strict=True))


def _first_layers(calls: _Calls[B]) -> _Calls[B]:
    """Returns the first call of each region."""
    first: dict[RegionCall, tuple[B, ...]] = {}
    for call, inputs in calls:
        first.setdefault(call, inputs)
    return [*first.items()]


def _run(first: B, calls: _Calls[B]) -> B:
    """Run calls in order, each on the result of the one before. Returns the last result."""
    hidden = first
    for call, inputs in calls:
        hidden = call(hidden, *inputs)
    return hidden
