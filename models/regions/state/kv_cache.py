"""Holds static buffers of the running rows, indexed by slot: K/V caches and the inputs and outputs of a step.

The buffers are allocated once. A step of b rows works on the views ``[:b]``, so changing the bucket copies
nothing. Imports no torch.
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
TEXTS = ("texts", "text")  # names of region inputs: the texts of all slots, and of a step's rows


class LayerCache(NamedTuple, Generic[B]):
    """Views of a decoder layer's caches for the first b slots.

    Keys are [b, H, d, L], values [b, H, L, d]. Cross-attention's keys are [b, H, d, T], its values [b, H, T, d].
    """

    key: B
    value: B
    cross_key: B
    cross_value: B


@dataclass(frozen=True)
class DecodeState(Generic[B]):
    """The contents of all slots, for N layers.

    L is the cache length, T the number of tokens of the image and of text encoded with it, H the heads of keys and
    values, P the greatest number of tokens of a text.

    The cross caches hold the K/V of cross-attention, or of a prefix in front of the caption's own tokens. Their
    last slot is scratch: padding rows of an encoder bucket write there, never into a request's slot. If an encode
    reads the beginning of a prompt, it also writes K/V of the row's own tokens. Then `key` and `value` have such a
    scratch slot too.
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
    # The text that an encode reads beside the image, [slots + 1, P] int64, -1 behind its end. None if no text is
    # read. Its K/V are the last P of the T in the cross caches, or, if the text is a prompt, the first P of a
    # row's own K/V.
    texts: B | None = None

    @classmethod
    def allocate(
        cls, config: ModelConfig, slots: int, cache_length: int, memory: Memory[B], dtype: str
    ) -> "DecodeState[B]":
        """Returns zeroed buffers. A NaN in uninitialised memory would survive the product after a masked softmax.

        Args:
            slots: number of slots, without scratch.
            cache_length: L, in tokens.
            dtype: of the caches, by its name in torch.
        """
        decoder, tokens = config.decoder, config.prefix_length
        layers, heads, head_dim = decoder.num_layers, decoder.kv_heads, decoder.head_dim

        def keys(*shape: int) -> B:
            # On CUDA a key is contiguous, because kernels read it whole and the encoder writes it whole.
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
        """Returns all buffers that exist, by name."""
        names = [each.name for each in fields(self) if each.name not in ("memory", "slots", "cache_length")]
        return {name: buffer for name in names if (buffer := getattr(self, name)) is not None}

    @property
    def dtype(self) -> str:
        """Returns the dtype of the caches, in which regions compute."""
        return self.memory.spec(self.key)[0]

    def layers(self, rows: int) -> list[LayerCache[B]]:
        """Returns views of the first ``rows`` slots, one for each decoder layer."""
        caches = [getattr(self, name) for name in CACHES]
        count = self.memory.spec(self.key)[1][0]
        return [
            LayerCache(*(self.memory.view(cache, layer, slice(rows)) for cache in caches)) for layer in range(count)
        ]

    def image_kv(self, layers: slice) -> tuple[B, B]:
        """Returns views of the image's keys [n, slots + 1, H, d, T] and values in some decoder layers."""
        return self.memory.view(self.cross_key, layers), self.memory.view(self.cross_value, layers)

    def own_kv(self, layers: slice) -> tuple[B, B]:
        """Returns views of the rows' own keys [n, slots + 1, H, d, L] and values in some decoder layers."""
        return self.memory.view(self.key, layers), self.memory.view(self.value, layers)

    def rows(self, names: Sequence[str], rows: int) -> tuple[B, ...]:
        """Returns views of the first ``rows`` slots of buffers, by name."""
        return tuple(self.memory.view(getattr(self, name), slice(rows)) for name in names)

    def texts_of(self, rows: int) -> dict[str, B]:
        """Returns the texts by the names of ``TEXTS``: all slots, and a view of the first ``rows``. Empty if no
        text is read."""
        if self.texts is None:
            return {}
        return dict(zip(TEXTS, (self.texts, self.memory.view(self.texts, slice(rows))), strict=True))

    def write_texts(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Writes the texts that an encode reads beside the images of these slots. An empty text is padding alone.
        Does nothing if encodes read no text."""
        if self.texts is None:
            return
        padded = np.full((len(slots), self.memory.spec(self.texts)[1][1]), -1)
        for row, text in zip(padded, texts, strict=False):
            row[: len(text)] = text
        self.memory.write(self.texts, slots, padded)

    def zeroed(self) -> "DecodeState[B]":
        """Returns zeroed buffers of the same shapes, strides, dtypes and device."""
        buffers = {name: self.memory.zeros(*self.memory.spec(buffer)) for name, buffer in self.buffers.items()}
        return DecodeState(self.memory, self.slots, self.cache_length, **buffers)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the contents of each source slot to its target slot. The moves may happen in any order.

        Raises:
            ValueError: a slot is both source and target, or twice a target.
        """
        if len({*sources, *targets}) != len({*sources}) + len(targets):
            raise ValueError(f"moves from {sources} to {targets} overlap")
        self._copy(sources, targets)

    @cached_property
    def _copy(self) -> CopySlots:
        return self.memory.copier([(buffer, int(name in CACHES)) for name, buffer in self.buffers.items()])
