"""Static buffers of the running rows: K/V caches and what a step reads and writes, indexed by slot. No torch.

Allocated once. A step of b rows works on the views ``[:b]``, so moving between buckets copies nothing.
"""

from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from typing import Generic, NamedTuple

import numpy as np

from snapcap.models.config import ModelConfig
from snapcap.models.dataclass import dataclass
from snapcap.models.memory.memory import B, CopySlots, Memory, row_major

SAMPLE_INPUTS = ("uniforms", "temperature", "top_k", "top_p")
CACHES = ("key", "value", "cross_key", "cross_value")
TEXTS = ("texts", "text")  # of all slots, and a row each


class LayerCache(NamedTuple, Generic[B]):
    """One decoder layer's caches for the first b slots: keys [b, H, d, L], values [b, H, L, d]; cross likewise."""

    key: B
    value: B
    cross_key: B
    cross_value: B


@dataclass(frozen=True)
class DecodeState(Generic[B]):
    """Everything a slot holds, for N layers. L is the cache length, T the tokens of the image and of what is beside
    it, H the heads of keys and values, P the most tokens of a text.

    The cross caches hold the K/V of the image's tokens, whether they are cross-attention's or those of a prefix
    that stands before a caption's own. Their last slot is scratch: an encoder bucket's padding rows write there,
    never into a request's slot. Where an encode reads the beginning of a prompt, which writes a caption's own K/V,
    these have such a slot too.
    """

    memory: Memory[B]
    slots: int
    cache_length: int
    key: B  # [N, slots, H, d, L], or slots + 1
    value: B  # [N, slots, H, L, d], likewise
    cross_key: B  # [N, slots + 1, H, d, T]
    cross_value: B  # [N, slots + 1, H, T, d]
    tokens: B  # [slots] int64
    positions: B  # [slots] int64
    forced: B  # [slots, L] int64
    uniforms: B  # [slots, L] fp32
    temperature: B  # [slots] fp32
    top_k: B  # [slots] int64
    top_p: B  # [slots] fp32
    # [slots + 1, P] int64: the text that an encode reads beside the image, -1 behind its end. Its K/V are the last
    # P of the cross caches' T, or, of a prompt, the first P of a row's own. None where no text is read.
    texts: B | None = None

    @classmethod
    def allocate(
        cls, config: ModelConfig, slots: int, cache_length: int, memory: Memory[B], dtype: str
    ) -> "DecodeState[B]":
        """Zeroed buffers: a NaN left in uninitialised memory would pass through a masked softmax's product."""
        decoder, tokens = config.decoder, config.prefix_length
        layers, heads, head_dim = decoder.num_layers, decoder.kv_heads, decoder.head_dim

        def keys(*shape: int) -> B:
            # On CUDA a key is contiguous: a kernel reads it whole, and the encoder writes it so.
            *outer, width, length = shape
            *steps, row, column = row_major((*outer, length, width))
            strides = (*steps, column, row) if memory.kind == "cuda" else None
            return memory.zeros(dtype, shape, strides)

        return cls(
            memory=memory,
            slots=slots,
            cache_length=cache_length,
            key=keys(layers, slots + decoder.reads_prompt, heads, head_dim, cache_length),
            value=memory.zeros(dtype, (layers, slots + decoder.reads_prompt, heads, cache_length, head_dim)),
            cross_key=keys(layers, slots + 1, heads, head_dim, tokens),
            cross_value=memory.zeros(dtype, (layers, slots + 1, heads, tokens, head_dim)),
            tokens=memory.zeros("int64", (slots,)),
            positions=memory.zeros("int64", (slots,)),
            forced=memory.zeros("int64", (slots, cache_length)),
            uniforms=memory.zeros("float32", (slots, cache_length)),
            temperature=memory.zeros("float32", (slots,)),
            top_k=memory.zeros("int64", (slots,)),
            top_p=memory.zeros("float32", (slots,)),
            texts=memory.zeros("int64", (slots + 1, decoder.text_tokens)) if decoder.text_tokens else None,
        )

    @property
    def buffers(self) -> dict[str, B]:
        """All of them, by name."""
        names = [each.name for each in fields(self) if each.name not in ("memory", "slots", "cache_length")]
        return {name: buffer for name in names if (buffer := getattr(self, name)) is not None}

    @property
    def dtype(self) -> str:
        """Of the caches, and so of what regions compute with."""
        return self.memory.spec(self.key)[0]

    def layers(self, rows: int) -> list[LayerCache[B]]:
        """Views of the first ``rows`` slots, one a decoder layer."""
        caches = [getattr(self, name) for name in CACHES]
        count = self.memory.spec(self.key)[1][0]
        return [
            LayerCache(*(self.memory.view(cache, layer, slice(rows)) for cache in caches)) for layer in range(count)
        ]

    def image_kv(self, layers: slice) -> tuple[B, B]:
        """Views of the image's keys [n, slots + 1, H, d, T] and values in some decoder layers."""
        return self.memory.view(self.cross_key, layers), self.memory.view(self.cross_value, layers)

    def own_kv(self, layers: slice) -> tuple[B, B]:
        """Views of a row's own keys [n, slots + 1, H, d, L] and values in some decoder layers."""
        return self.memory.view(self.key, layers), self.memory.view(self.value, layers)

    def rows(self, names: Sequence[str], rows: int) -> tuple[B, ...]:
        """Views of buffers that hold a row a slot, of the first ``rows``."""
        return tuple(self.memory.view(getattr(self, name), slice(rows)) for name in names)

    def texts_of(self, rows: int) -> dict[str, B]:
        """What regions call the texts: all slots', and the view of those of the first ``rows``; nothing where none
        is read."""
        if self.texts is None:
            return {}
        return dict(zip(TEXTS, (self.texts, self.memory.view(self.texts, slice(rows))), strict=True))

    def write_texts(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """What an encode reads beside the images of these slots: tokens, none for a slot that has no text; where it
        reads none, nothing happens."""
        if self.texts is None:
            return
        padded = np.full((len(slots), self.memory.spec(self.texts)[1][1]), -1)
        for row, text in zip(padded, texts, strict=False):
            row[: len(text)] = text
        self.memory.write(self.texts, slots, padded)

    def zeroed(self) -> "DecodeState[B]":
        """Buffers of the same shapes, strides, dtypes and device, zeroed."""
        buffers = {name: self.memory.zeros(*self.memory.spec(buffer)) for name, buffer in self.buffers.items()}
        return DecodeState(self.memory, self.slots, self.cache_length, **buffers)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy everything each source slot holds into its target slot: one or more moves, whose order is open.

        Raises:
            ValueError: a slot is both source and target, or twice a target.
        """
        if len({*sources, *targets}) != len({*sources}) + len(targets):
            raise ValueError(f"moves from {sources} to {targets} overlap")
        self._copy(sources, targets)

    @cached_property
    def _copy(self) -> CopySlots:
        return self.memory.copier([(buffer, int(name in CACHES)) for name, buffer in self.buffers.items()])
