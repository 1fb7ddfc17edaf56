"""The regions of a captioner: what is compiled, one at a time, with weights as inputs.

A region takes activations and caches first, then its weights, and returns one tensor. It holds no state,
so one compiled block serves all layers, and one artifact every checkpoint of the same shapes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from models import gpt2, vit
from models.activations import activation
from models.config import ModelConfig
from models.kv_cache import DecodeState

Component = Literal["encoder", "decoder"]
RegionFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class Region:
    """A pure function, the names of its activations and caches, and those of its weights, which follow them.

    ``layers`` is the number of weight sets, all of the same shapes.
    """

    name: str
    component: Component
    function: RegionFunction
    input_names: tuple[str, ...]
    weight_names: tuple[str, ...]
    layers: int = 1


@dataclass(frozen=True)
class Regions:
    """All regions in the order in which they run: encode is the first three, a decode step the others."""

    encoder_before: Region
    encoder_block: Region
    encoder_after: Region
    decoder_before: Region
    decoder_block: Region
    decoder_after: Region

    def __iter__(self) -> Iterator[Region]:
        return iter(
            (
                self.encoder_before,
                self.encoder_block,
                self.encoder_after,
                self.decoder_before,
                self.decoder_block,
                self.decoder_after,
            )
        )


def build_regions(config: ModelConfig) -> Regions:
    """Bind a checkpoint's dimensions to the region functions; no tensor is touched."""
    vision, decoder = config.vision, config.decoder
    projection = gpt2.PROJECTION_WEIGHTS if config.projected else ()
    return Regions(
        encoder_before=Region(
            "encoder_before",
            "encoder",
            partial(vit.embed, grid=vision.grid, patch_size=vision.patch_size),
            ("pixels",),
            vit.EMBED_WEIGHTS,
        ),
        encoder_block=Region(
            "encoder_block",
            "encoder",
            partial(
                vit.block,
                num_heads=vision.num_heads,
                eps=vision.layer_norm_eps,
                act=activation(vision.activation),
            ),
            ("hidden",),
            vit.BLOCK_WEIGHTS,
            layers=vision.num_layers,
        ),
        encoder_after=Region(
            "encoder_after",
            "encoder",
            partial(gpt2.cross_kv, eps=vision.layer_norm_eps),
            ("hidden", "slots", "key_cache", "value_cache"),
            gpt2.CROSS_WEIGHTS + projection,
        ),
        decoder_before=Region("decoder_before", "decoder", gpt2.embed, ("tokens", "positions"), gpt2.EMBED_WEIGHTS),
        decoder_block=Region(
            "decoder_block",
            "decoder",
            partial(
                gpt2.block,
                eps=decoder.layer_norm_eps,
                scale=decoder.head_dim**-0.5 if decoder.scale_attention else 1.0,
                act=activation(decoder.activation),
            ),
            ("hidden", "positions", "key_cache", "value_cache", "cross_key", "cross_value"),
            gpt2.BLOCK_WEIGHTS,
            layers=decoder.num_layers,
        ),
        decoder_after=Region(
            "decoder_after",
            "decoder",
            partial(gpt2.head, eps=decoder.layer_norm_eps),
            ("hidden", "tokens", "positions", "forced"),
            gpt2.HEAD_WEIGHTS,
        ),
    )


def region_inputs(
    region: Region, config: ModelConfig, state: DecodeState, rows: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Activations and caches of the region for a bucket of ``rows``, in its order: static views of ``state``
    where the runner passes these, fresh zeros for what one region hands to the next.

    Used wherever a region is compiled or checked alone; its weights follow in ``weight_names`` order.
    """
    device = state.tokens.device
    vision, width = config.vision, config.decoder.hidden_size
    tokens, positions = state.tokens[:rows], state.positions[:rows]
    if region.name == "encoder_before":
        return (torch.zeros(rows, *vision.image_size, 3, dtype=torch.uint8, device=device),)
    if region.component == "encoder":
        hidden = torch.zeros(rows, vision.sequence_length, vision.hidden_size, dtype=dtype, device=device)
        if region.name == "encoder_block":
            return (hidden,)
        return hidden, torch.arange(rows, device=device), state.cross_key, state.cross_value
    if region.name == "decoder_before":
        return tokens, positions
    hidden = torch.zeros(rows, width, dtype=dtype, device=device)
    if region.name == "decoder_block":
        layer = state.layers(rows)[0]
        return hidden, positions, layer.key, layer.value, layer.cross_key, layer.cross_value
    return hidden, tokens, positions, state.forced[:rows]
