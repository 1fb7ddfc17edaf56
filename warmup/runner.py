"""Runs a captioner's regions at a bucket: encode images into slots, and one decode step for all rows.

Only the device thread calls it. Buffers are allocated once; a bucket is a set of views on them, so there is
nothing to copy when the engine moves between buckets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.config import ModelConfig
from models.kv_cache import DecodeState
from models.regions import Component, RegionFunction, Regions
from models.sampling import sample
from models.weights import Weights, WeightSet
from warmup.backends.base import Backend
from warmup.buckets import Bucket
from warmup.row import Row

Pixels = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]


class Callables(NamedTuple):
    """What runs one component at one bucket: the part before the blocks, every block, the part after them."""

    before: RegionFunction
    block: RegionFunction
    after: RegionFunction


def open_callables(regions: Regions, component: Component, bucket: Bucket, backend: Backend) -> Callables:
    """The backend's callables for a component; raises what the backend raises."""
    parts = (region for region in regions if region.component == component)
    return Callables(*(backend.callable(region, bucket) for region in parts))


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
    captured: _Captured | None = None


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
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Thread-local: threads that decode images must not break a capture that they have no part in.
        with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            if component == "encoder":
                output = self._run_encoder(self._encode[bucket])
            else:
                output = self._run_decoder(self._step[bucket])
        captured = _Captured(graph, output)
        if component == "encoder":
            self._encode[bucket] = replace(self._encode[bucket], captured=captured)
        else:
            self._step[bucket] = replace(self._step[bucket], captured=captured)

    def twin(self) -> "Runner":
        """A runner over the same weights with zeroed buffers of its own and nothing bound: for trying things
        while rows are running here."""
        state = DecodeState(**{name: torch.zeros_like(buffer) for name, buffer in vars(self.state).items()})
        return Runner(self.config, self.regions, self._weights, state)

    def _encode_plan(self, bucket: Bucket, callables: Callables) -> _EncodePlan:
        known = self._encode.get(bucket)
        if known is not None:
            return replace(known, run=callables, captured=None)
        height, width = self.config.vision.image_size
        return _EncodePlan(
            pixels=torch.zeros(bucket.size, height, width, 3, dtype=torch.uint8, device=self.device),
            slots=torch.zeros(bucket.size, dtype=torch.int64, device=self.device),
            run=callables,
        )

    def _step_plan(self, bucket: Bucket, callables: Callables) -> _StepPlan:
        known = self._step.get(bucket)
        if known is not None:
            return replace(known, run=callables, captured=None)
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
        )

    def encode(self, bucket: Bucket, images: Sequence[Pixels], first_slot: int) -> Tensor:
        """Encode images [height, width, 3] into the slots ``first_slot``, ``first_slot + 1``, …

        Returns the encoder's output [bucket, tokens, hidden]; rows after ``len(images)`` are padding, whose
        cross-attention K/V goes to the scratch slot.
        """
        plan, count = self._encode[bucket], len(images)
        plan.pixels[:count].copy_(torch.from_numpy(np.stack(images)))
        slots = list(range(first_slot, first_slot + count)) + [self.state.slots] * (bucket.size - count)
        plan.slots.copy_(torch.tensor(slots))
        return plan.captured.replay() if plan.captured else self._run_encoder(plan)

    def admit(self, slot: int, row: Row) -> None:
        """Put a request at its start: the start token at position 0, and its prompt as forced tokens."""
        state, generation = self.state, self.config.generation
        forced = torch.full((state.cache_length,), -1)
        if row.prompt:
            forced[1 : 1 + len(row.prompt)] = torch.tensor(row.prompt)
        state.forced[slot].copy_(forced)
        state.tokens[slot] = generation.start_id
        state.positions[slot] = 0
        state.temperature[slot] = row.temperature
        if row.temperature > 0:
            state.top_k[slot] = row.top_k or self.config.decoder.vocab_size
            state.top_p[slot] = row.top_p
            state.uniforms[slot].copy_(torch.tensor(row.uniforms))

    def decode_step(self, bucket: Bucket, sampling: bool = False) -> Tensor:
        """Advance every row of the bucket by one token and return the logits [bucket, vocabulary].

        ``sampling`` must be set when a running row has a temperature above 0.
        """
        plan, rows = self._step[bucket], bucket.size
        logits = plan.captured.replay() if plan.captured else self._run_decoder(plan)
        if sampling:
            state = self.state
            sample(
                logits,
                plan.tokens,
                plan.positions,
                plan.forced,
                state.uniforms[:rows],
                state.temperature[:rows],
                state.top_k[:rows],
                state.top_p[:rows],
            )
        return logits

    def tokens(self, rows: int) -> list[int]:
        """The last tokens of the first ``rows`` slots; waits for the device."""
        tokens: list[int] = self.state.tokens[:rows].tolist()
        return tokens

    def allocated_bytes(self) -> int:
        """Bytes the process holds on a CUDA device; 0 on the CPU."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def wait(self) -> None:
        """Until the device has done all it was given; the CPU has by now."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def move(self, source: int, target: int) -> None:
        """Move a running row into a slot that has become free."""
        self.state.move(source, target)

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
