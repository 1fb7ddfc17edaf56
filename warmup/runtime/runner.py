"""Runs a captioner's regions at a bucket: encode images into slots, and one decode step for all rows.

Only the device thread calls it. Buffers are allocated once; a bucket is a set of views on them, so there is
nothing to copy when the engine moves between buckets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.regions.state.kv_cache import DecodeState
from snapcap.models.regions.table import Component, RegionFunction, Regions
from snapcap.models.weights.load import Weights, WeightSet
from snapcap.warmup.plan.buckets import Bucket
from snapcap.warmup.runtime.backends.base import Backend
from snapcap.warmup.runtime.device import DeviceHealth, device_health
from snapcap.warmup.runtime.readback import DeviceTimer, PendingTokens, TokenReadback
from snapcap.warmup.runtime.slot_request import GREEDY, Needs, SlotRequest
from snapcap.warmup.runtime.staging import Pixels, Staging
from snapcap.warmup.runtime.token_choice import Choice, TokenChoice


class Callables(NamedTuple):
    """What runs one component at one bucket: the part before the blocks, every block, the part after them, and in a
    decoder what chooses other tokens than the most likely."""

    before: RegionFunction
    block: RegionFunction
    after: RegionFunction
    choice: Choice | None = None


def open_callables(regions: Regions, component: Component, bucket: Bucket, backend: Backend) -> Callables:
    """The backend's callables for a component; raises what the backend raises."""
    parts = (backend.callable(region, bucket) for region in regions if region.component == component)
    return Callables(next(parts), next(parts), next(parts), Choice(*parts) if component == "decoder" else None)


@dataclass(frozen=True)
class _Captured:
    """A CUDA graph, and the static tensor that a replay leaves its result in."""

    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.output


@dataclass(frozen=True)
class _EncodePlan:
    """The encoder's regions at one bucket, with everything but the images bound."""

    staging: Staging
    pixels: Tensor  # [B, height, width, 3] uint8
    slots: Tensor  # [B] int64
    run: Callables
    captured: _Captured | None = None


@dataclass(frozen=True)
class _StepPlan:
    """The decoder's regions at one bucket, with the caches' views and the weights of each layer bound."""

    tokens: Tensor
    positions: Tensor
    forced: Tensor
    layers: list[tuple[Tensor, ...]]
    run: Callables
    choice: Choice
    captured: _Captured | None = None
    # With penalties and beams, by what of these it does; recorded when a row needs them first.
    choices: dict[Needs, _Captured] = field(default_factory=dict)


class Runner:
    """Static buffers and, for every bucket, the callables that work on them."""

    def __init__(
        self,
        config: ModelConfig,
        regions: Regions,
        weights: Weights,
        state: DecodeState,
    ) -> None:
        self.config = config
        self.state = state
        self.regions = regions
        self._weights = weights
        self._encode: dict[Bucket, _EncodePlan] = {}
        self._step: dict[Bucket, _StepPlan] = {}
        self._graph_pool: Any = None  # made with the first graph; all share it, as only one runs at a time
        self._readback = TokenReadback(state.tokens)
        self._choice = TokenChoice(state, config.generation, config.decoder.vocab_size)

    @property
    def device(self) -> torch.device:
        return self.state.tokens.device

    def bind(self, component: Component, bucket: Bucket, callables: Callables) -> None:
        """Run a component's bucket with these callables from now on."""
        if component == "encoder":
            self._encode[bucket] = self._encode_plan(bucket, callables)
        else:
            self._step[bucket] = self._step_plan(bucket, callables)

    def bound(self, component: Component, bucket: Bucket) -> Callables:
        """What runs a component's bucket now."""
        return self._encode[bucket].run if component == "encoder" else self._step[bucket].run

    def capture(self, component: Component, bucket: Bucket) -> None:
        """Record everything a bucket launches as one CUDA graph; from now on it is replayed.

        The bucket must have run once, since a first call allocates and loads. Capturing the largest bucket first
        lets the smaller ones live in its memory. Recording launches nothing, so rows may be running.
        """
        if component == "encoder":
            encode = self._encode[bucket]
            self._encode[bucket] = replace(encode, captured=self._record(lambda: self._run_encoder(encode)))
        else:
            step = self._step[bucket]
            self._step[bucket] = replace(step, captured=self._record(lambda: self._run_decoder(step)))

    def _record(self, run: Callable[[], Tensor]) -> _Captured:
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Thread-local: threads that decode images must not break a capture that they have no part in.
        with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            output = run()
        return _Captured(graph, output)

    def replay(self, component: Component, bucket: Bucket) -> Callable[[], Tensor]:
        """What replays a captured bucket, without its inputs: for timing the device alone."""
        captured = (self._encode[bucket] if component == "encoder" else self._step[bucket]).captured
        if captured is None:
            raise ValueError(f"{component} bucket {bucket.size} is not captured")
        return captured.replay

    def twin(self) -> "Runner":
        """A runner over the same weights with zeroed buffers of its own and nothing bound: for trying things
        while rows are running here."""
        return Runner(self.config, self.regions, self._weights, self.state.zeroed())

    def _encode_plan(self, bucket: Bucket, callables: Callables) -> _EncodePlan:
        known = self._encode.get(bucket)
        if known is not None:
            return replace(known, run=callables, captured=None)
        height, width = self.config.vision.image_size
        pixels = torch.zeros(bucket.size, height, width, 3, dtype=torch.uint8, device=self.device)
        slots = torch.zeros(bucket.size, dtype=torch.int64, device=self.device)
        return _EncodePlan(Staging(pixels, slots), pixels, slots, callables)

    def _step_plan(self, bucket: Bucket, callables: Callables) -> _StepPlan:
        if callables.choice is None:
            raise ValueError("these are an encoder's callables")
        known = self._step.get(bucket)
        if known is not None:
            return replace(known, run=callables, choice=callables.choice, captured=None, choices={})
        state, rows = self.state, bucket.size
        positions = state.positions[:rows]
        caches = ((c.key, c.value, c.cross_key, c.cross_value) for c in state.layers(rows))
        blocks = self._weights.of(self.regions.decoder_block)
        return _StepPlan(
            tokens=state.tokens[:rows],
            positions=positions,
            forced=state.forced[:rows],
            layers=[(positions, *cache, *weights) for cache, weights in zip(caches, blocks, strict=True)],
            run=callables,
            choice=callables.choice,
        )

    def encode(self, bucket: Bucket, images: Sequence[Pixels], first_slot: int) -> Tensor:
        """Encode images [height, width, 3] into the slots ``first_slot``, ``first_slot + 1``, …

        Returns the encoder's output [bucket, tokens, hidden]; rows after ``len(images)`` are padding, whose
        cross-attention K/V goes to the scratch slot.
        """
        plan, count = self._encode[bucket], len(images)
        slots = list(range(first_slot, first_slot + count)) + [self.state.slots] * (bucket.size - count)
        plan.staging.copy(images, slots)
        return plan.captured.replay() if plan.captured else self._run_encoder(plan)

    def admit(self, first_slot: int, rows: Sequence[SlotRequest]) -> None:
        """Put requests at their start: the start token at position 0, and their prompts as forced tokens."""
        state, slots = self.state, slice(first_slot, first_slot + len(rows))
        state.tokens[slots] = self.config.generation.start_id
        state.positions[slots] = 0
        state.forced[slots] = -1
        state.temperature[slots] = 0.0
        for slot, row in enumerate(rows, start=first_slot):
            if row.prompt:
                self._put(state.forced[slot, 1 : 1 + len(row.prompt)], row.prompt)
            if row.params.samples:
                state.temperature[slot] = row.params.temperature
                state.top_k[slot] = row.params.top_k or self.config.decoder.vocab_size
                state.top_p[slot] = row.params.top_p
                self._put(state.uniforms[slot], row.uniforms)
        self._choice.start(first_slot, rows)

    def group(self, slots: Sequence[int], row: SlotRequest) -> None:
        """Make slots the rows of one beam search, all of them as the first, which has been admitted."""
        self._choice.group(slots, row)

    @staticmethod
    def _put(target: Tensor, values: Sequence[float]) -> None:
        """Copy a few numbers to the device. They are small enough for the driver to take at once."""
        target.copy_(torch.tensor(values, dtype=target.dtype), non_blocking=True)

    def decode_step(self, bucket: Bucket, needs: Needs = GREEDY) -> Tensor:
        """Advance every row of the bucket by one token and return its scores [bucket, vocabulary]: the logits, or
        what penalties and beams make of them.

        ``needs`` must name everything that one of the running rows needs.
        """
        plan = self._step[bucket]
        if needs.penalties or needs.beams:
            scores = self._chosen(plan, replace(needs, sampling=False))
        else:
            scores = plan.captured.replay() if plan.captured else self._run_decoder(plan)
        if needs.sampling:
            self._choice.sample(scores, bucket.size, plan.choice)
        return scores

    def _chosen(self, plan: _StepPlan, needs: Needs) -> Tensor:
        """A step with penalties and beams, on CUDA as one graph. That is recorded here, not at the start, which
        those who never use beams would wait for; it takes no compiler, and the step is made all the same."""
        if needs in plan.choices:
            return plan.choices[needs].replay()
        if plan.captured is None:
            return self._apply(plan, self._run_decoder(plan), needs)
        scores = self._apply(plan, plan.captured.replay(), needs)
        plan.choices[needs] = self._record(lambda: self._apply(plan, self._run_decoder(plan), needs))
        return scores

    def _apply(self, plan: _StepPlan, logits: Tensor, needs: Needs) -> Tensor:
        return self._choice.apply(logits, len(plan.tokens), needs, plan.choice)

    @property
    def runs_ahead(self) -> bool:
        """Whether the device works while the host goes on: then a step may be launched before the last is read."""
        return self.device.type == "cuda"

    def read_tokens(self, rows: int, beams: bool = False) -> PendingTokens:
        """The last tokens of the first ``rows`` slots, as of now, to be read later on; with those of ended searches
        if rows are ``beams``."""
        return self._readback.start(rows, self._choice.beams.outcomes if beams else None)

    def tokens(self, rows: int) -> list[int]:
        """The last tokens of the first ``rows`` slots; waits for the device."""
        return self.read_tokens(rows).result()

    def timer(self) -> DeviceTimer:
        """Times what the device is given from now on, until it is stopped."""
        return DeviceTimer(self.device)

    def allocated_bytes(self) -> int:
        """Bytes the process holds on a CUDA device; 0 on the CPU."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def wait(self) -> None:
        """Until the device has done all it was given; the CPU has by now."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def health(self, error: Exception) -> DeviceHealth:
        """What an error that a call here has raised says of the device."""
        return device_health(self.state.positions, error)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move running rows (source slot, target slot) into slots that have become free."""
        if moves:
            sources, targets = zip(*moves, strict=True)
            self.state.move(sources, targets)
            self._choice.move(sources, targets)

    def _run_encoder(self, plan: _EncodePlan) -> Tensor:
        hidden = plan.run.before(plan.pixels, *self._one(self.regions.encoder_before.name))
        for weights in self._weights.of(self.regions.encoder_block):
            hidden = plan.run.block(hidden, *weights)
        after = self._one(self.regions.encoder_after.name)
        return plan.run.after(hidden, plan.slots, self.state.cross_key, self.state.cross_value, *after)

    def _run_decoder(self, plan: _StepPlan) -> Tensor:
        hidden = plan.run.before(plan.tokens, plan.positions, *self._one(self.regions.decoder_before.name))
        for inputs in plan.layers:
            hidden = plan.run.block(hidden, *inputs)
        after = self._one(self.regions.decoder_after.name)
        return plan.run.after(hidden, plan.tokens, plan.positions, plan.forced, *after)

    def _one(self, region: str) -> WeightSet:
        return self._weights.sets[region][0]
