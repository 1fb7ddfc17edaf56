"""Wraps transformers' own encoder and decoder as the two functions to export."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache


class Encoder(nn.Module):
    """Maps pixels to keys and values of every cross-attention, so the decoder computes nothing of an image
    again."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        hidden = self._model.encoder(pixels).last_hidden_state
        if hasattr(self._model, "enc_to_dec_proj"):
            hidden = self._model.enc_to_dec_proj(hidden)
        caches: list[Tensor] = []
        for block in self._model.decoder.transformer.h:
            attention = block.crossattention
            parts = attention.c_attn(hidden).split(attention.split_size, dim=2)
            caches += [part.unflatten(2, (-1, attention.head_dim)).transpose(1, 2) for part in parts]
        return tuple(caches)


class Decoder(nn.Module):
    """Maps one token of each row, and the keys and values so far, to the next tokens and the new keys and values.

    GPT-2's blocks are called instead of the whole model, which would make masks that one token does not need. The
    greedy choice is made inside, so logits never leave the runtime.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._decoder = model.decoder

    def forward(self, tokens: Tensor, past: tuple[Tensor, ...], cross: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        transformer = self._decoder.transformer
        cache = EncoderDecoderCache(_cache(past), _cache(cross))
        cache.is_updated = dict.fromkeys(range(len(transformer.h)), True)
        position = torch.full((1, 1), past[0].shape[2])
        hidden = transformer.wte(tokens) + transformer.wpe(position)
        for block in transformer.h:
            # Only the shape of the image's states matters: their keys and values are in the cache.
            hidden = block(hidden, past_key_values=cache, encoder_hidden_states=hidden)
        logits = self._decoder.lm_head(transformer.ln_f(hidden))
        layers = cast(Any, cache.self_attention_cache).layers
        present = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        return (logits[:, -1].argmax(-1, keepdim=True), *present)


def _cache(tensors: tuple[Tensor, ...]) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(len(tensors) // 2):
        cache.update(tensors[2 * layer], tensors[2 * layer + 1], layer)
    return cache
