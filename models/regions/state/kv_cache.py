"""Static buffers of the running rows: K/V caches and what a step reads and writes, indexed by slot.

Allocated once. A step of b rows works on the views ``[:b]``, so moving between buckets copies nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from snapcap.models.config import ModelConfig

SAMPLE_INPUTS = ("uniforms", "temperature", "top_k", "top_p")


@dataclass(frozen=True)
class LayerCache:
    """One decoder layer's caches for the first b slots: keys [b, H, d, L], values [b, H, L, d]; cross likewise."""

    key: Tensor
    value: Tensor
    cross_key: Tensor
    cross_value: Tensor


@dataclass(frozen=True)
class DecodeState:
    """Everything a slot holds, for N layers. L is the cache length, T the encoder tokens.

    The last cross slot is scratch: an encoder bucket's padding rows write there, never into a request's slot.
    """

    key: Tensor  # [N, slots, H, d, L]
    value: Tensor  # [N, slots, H, L, d]
    cross_key: Tensor  # [N, slots + 1, H, d, T]
    cross_value: Tensor  # [N, slots + 1, H, T, d]
    tokens: Tensor  # [slots] int64
    positions: Tensor  # [slots] int64
    forced: Tensor  # [slots, L] int64
    uniforms: Tensor  # [slots, L] fp32
    temperature: Tensor  # [slots] fp32
    top_k: Tensor  # [slots] int64
    top_p: Tensor  # [slots] fp32

    @classmethod
    def allocate(
        cls, config: ModelConfig, slots: int, cache_length: int, device: torch.device, dtype: torch.dtype
    ) -> "DecodeState":
        """Zeroed buffers: a NaN left in uninitialised memory would pass through a masked softmax's product."""
        decoder, tokens = config.decoder, config.vision.sequence_length
        layers, heads, head_dim = decoder.num_layers, decoder.num_heads, decoder.head_dim

        def buffer(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        def keys(*shape: int) -> Tensor:
            # On CUDA a key is contiguous: a kernel reads it whole, and the encoder writes it so.
            *outer, width, length = shape
            return buffer(*outer, length, width).mT if device.type == "cuda" else buffer(*shape)

        return cls(
            key=keys(layers, slots, heads, head_dim, cache_length),
            value=buffer(layers, slots, heads, cache_length, head_dim),
            cross_key=keys(layers, slots + 1, heads, head_dim, tokens),
            cross_value=buffer(layers, slots + 1, heads, tokens, head_dim),
            tokens=buffer(slots, kind=torch.int64),
            positions=buffer(slots, kind=torch.int64),
            forced=buffer(slots, cache_length, kind=torch.int64),
            uniforms=buffer(slots, cache_length, kind=torch.float32),
            temperature=buffer(slots, kind=torch.float32),
            top_k=buffer(slots, kind=torch.int64),
            top_p=buffer(slots, kind=torch.float32),
        )

    @property
    def slots(self) -> int:
        return self.tokens.shape[0]

    @property
    def cache_length(self) -> int:
        return self.forced.shape[1]

    def layers(self, rows: int) -> list[LayerCache]:
        """Views of the first ``rows`` slots, one a decoder layer."""
        caches = (self.key, self.value, self.cross_key, self.cross_value)
        return [LayerCache(*(cache[layer, :rows] for cache in caches)) for layer in range(self.key.shape[0])]

    def sampling(self, rows: int) -> tuple[Tensor, ...]:
        """``SAMPLE_INPUTS`` of the first ``rows`` slots."""
        return tuple(getattr(self, name)[:rows] for name in SAMPLE_INPUTS)

    def zeroed(self) -> "DecodeState":
        """Buffers of the same shapes, strides, dtypes and device, zeroed."""
        return DecodeState(**{each.name: torch.zeros_like(getattr(self, each.name)) for each in fields(self)})

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy everything each source slot holds into its target slot: one or more moves, whose order is open.

        On CUDA that is a launch for each 64 views (`_held`), without an index to bring there and without a wait.

        Raises:
            ValueError: a slot is both source and target, or twice a target.
        """
        if len({*sources, *targets}) != len({*sources}) + len(targets):
            raise ValueError(f"moves from {sources} to {targets} overlap")
        to, of = [self._held(slot) for slot in targets], [self._held(slot) for slot in sources]
        for kind in range(len(self._buffers)):
            torch._foreach_copy_(
                [view for held in to for view in held[kind]], [view for held in of for view in held[kind]]
            )

    def _held(self, slot: int) -> list[list[Tensor]]:
        """Views of everything a slot holds. They are made when a slot is first asked for: those of all slots at
        once would keep the rows waiting."""
        held = self._views.get(slot)
        if held is None:
            held = self._views[slot] = [[buffer[slot] for buffer in kind] for kind in self._buffers]
        return held

    @cached_property
    def _views(self) -> dict[int, list[list[Tensor]]]:
        return {}

    @cached_property
    def _buffers(self) -> list[list[Tensor]]:
        """All buffers, slots first, as int64 those that can be and as int16 the others.

        CUDA copies together what is contiguous and of one dtype, a layer's [slots, n], and large numbers fastest.
        A CPU copies one after the other, each with all its threads: all layers' [slots, N, n] at once.
        """
        rows = (self.tokens, self.positions, self.forced, self.uniforms, self.temperature, self.top_k, self.top_p)
        buffers = [each.view(self.slots, -1) for each in rows]
        for cache in (self.key, self.value, self.cross_key, self.cross_value):
            stored = cache if cache.is_contiguous() else cache.mT
            flat = stored.view(*stored.shape[:2], -1)
            buffers += flat.unbind() if flat.is_cuda else [flat.transpose(0, 1)]
        wide = [each.shape[-1] * each.element_size() % 8 == 0 for each in buffers]
        return [
            [each.view(torch.int64) for each, fits in zip(buffers, wide, strict=True) if fits],
            [each.view(torch.int16) for each, fits in zip(buffers, wide, strict=True) if not fits],
        ]
