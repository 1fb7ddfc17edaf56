"""Runs a captioner's regions at a bucket: encode images into slots, and one decode step for all rows.

Only the device thread calls it. Buffers are allocated once; a bucket is a set of views on them, so there is
nothing to copy when the engine moves between buckets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.config import ModelConfig
from models.kv_cache import DecodeState
from models.regions import RegionFunction, Regions
from models.sampling import sample
from models.weights import Weights, WeightSet
from warmup.backends.base import Backend
from warmup.buckets import Bucket, BucketTable
from warmup.row import Row

Pixels = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]


@dataclass(frozen=True)
class _EncodePlan:
    """The encoder's regions at one bucket, with everything but the images bound."""

    pixels: Tensor  # [B, height, width, 3] uint8
    slots: Tensor  # [B] int64
    before: RegionFunction
    block: RegionFunction
    after: RegionFunction


@dataclass(frozen=True)
class _StepPlan:
    """The decoder's regions at one bucket, with the caches' views and the weights of each layer bound."""

    tokens: Tensor
    positions: Tensor
    forced: Tensor
    before: RegionFunction
    block: RegionFunction
    layers: list[tuple[Tensor, ...]]
    after: RegionFunction


class Runner:
    """Static buffers and, for every bucket, the callables that work on them."""

    def __init__(
        self,
        config: ModelConfig,
        regions: Regions,
        weights: Weights,
        state: DecodeState,
        table: BucketTable,
    ) -> None:
        self.config = config
        self.table = table
        self.state = state
        self._regions = regions
        self._weights = weights
        self._encode: dict[Bucket, _EncodePlan] = {}
        self._step: dict[Bucket, _StepPlan] = {}

    @property
    def device(self) -> torch.device:
        return self.state.tokens.device

    def use_encoder(self, bucket: Bucket, backend: Backend) -> None:
        """Run the encoder's ``bucket`` with this backend's callables from now on."""
        device, vision, regions = self.device, self.config.vision, self._regions
        known = self._encode.get(bucket)
        scratch = self.state.slots
        self._encode[bucket] = _EncodePlan(
            pixels=known.pixels
            if known
            else torch.zeros(bucket.size, *vision.image_size, 3, dtype=torch.uint8, device=device),
            slots=known.slots if known else torch.full((bucket.size,), scratch, device=device),
            before=backend.callable(regions.encoder_before, bucket),
            block=backend.callable(regions.encoder_block, bucket),
            after=backend.callable(regions.encoder_after, bucket),
        )

    def use_decoder(self, bucket: Bucket, backend: Backend) -> None:
        """Run the decode step of ``bucket`` with this backend's callables from now on."""
        state, regions, rows = self.state, self._regions, bucket.size
        positions = state.positions[:rows]
        caches = ((c.key, c.value, c.cross_key, c.cross_value) for c in state.layers(rows))
        blocks = self._weights.of(regions.decoder_block)
        self._step[bucket] = _StepPlan(
            tokens=state.tokens[:rows],
            positions=positions,
            forced=state.forced[:rows],
            before=backend.callable(regions.decoder_before, bucket),
            block=backend.callable(regions.decoder_block, bucket),
            layers=[(positions, *cache, *weights) for cache, weights in zip(caches, blocks, strict=True)],
            after=backend.callable(regions.decoder_after, bucket),
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
        hidden = plan.before(plan.pixels, *self._one(self._regions.encoder_before.name))
        for weights in self._weights.of(self._regions.encoder_block):
            hidden = plan.block(hidden, *weights)
        after = self._one(self._regions.encoder_after.name)
        return plan.after(hidden, plan.slots, self.state.cross_key, self.state.cross_value, *after)

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
        hidden = plan.before(plan.tokens, plan.positions, *self._one(self._regions.decoder_before.name))
        for inputs in plan.layers:
            hidden = plan.block(hidden, *inputs)
        after = self._one(self._regions.decoder_after.name)
        logits = plan.after(hidden, plan.tokens, plan.positions, plan.forced, *after)
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

    def move(self, source: int, target: int) -> None:
        """Move a running row into a slot that has become free."""
        self.state.move(source, target)

    def _one(self, region: str) -> WeightSet:
        return self._weights.sets[region][0]
