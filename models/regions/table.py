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

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import BeitConfig, BertConfig, DecoderConfig, Gpt2Config
from snapcap.models.regions import bert, cross_kv, gpt2, names, vit
from snapcap.models.regions.activations import activation
from snapcap.models.regions.choice import beam_search
from snapcap.models.regions.choice.penalties import penalise
from snapcap.models.regions.choice.sampling import sample
from snapcap.models.regions.state.beams import PENALISE_INPUTS, SELECT_INPUTS, BeamState
from snapcap.models.regions.state.kv_cache import SAMPLE_INPUTS, DecodeState

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

    @property
    def on_demand(self) -> bool:
        """Whether it runs only when a request asks for what it does, so that no start waits for it."""
        return self.name in names.ON_DEMAND


@dataclass(frozen=True)
class Regions:
    """All regions in the order in which they run: encode is the first three, a decode step the next three, and the
    others where a row is penalised, sampled or a beam."""

    encoder_before: Region
    encoder_block: Region
    encoder_after: Region
    decoder_before: Region
    decoder_block: Region
    decoder_after: Region
    decoder_penalties: Region
    decoder_sampling: Region
    decoder_beams: Region

    def __iter__(self) -> Iterator[Region]:
        return iter(
            (
                self.encoder_before,
                self.encoder_block,
                self.encoder_after,
                self.decoder_before,
                self.decoder_block,
                self.decoder_after,
                self.decoder_penalties,
                self.decoder_sampling,
                self.decoder_beams,
            )
        )


def build_regions(config: ModelConfig) -> Regions:
    """Bind a checkpoint's dimensions to the region functions; no tensor is touched."""
    rows = ("tokens", "positions", "forced")
    beams = ("logits", "normalised", *rows, "ends", "key_cache", "value_cache", *SELECT_INPUTS)
    return Regions(
        *_encoder(config),
        *_decoder(config.decoder),
        Region(names.PENALTIES, "decoder", penalise, ("logits", *rows, *PENALISE_INPUTS), ()),
        Region(names.SAMPLING, "decoder", sample, ("logits", *rows, *SAMPLE_INPUTS, "sequences"), ()),
        Region(names.BEAMS, "decoder", beam_search.select, beams, ()),
    )


def _encoder(config: ModelConfig) -> tuple[Region, Region, Region]:
    vision = config.vision
    act, eps = activation(vision.activation), vision.layer_norm_eps
    relative = isinstance(vision, BeitConfig) and vision.relative
    return (
        Region(
            "encoder_before",
            "encoder",
            partial(vit.embed, grid=vision.grid, patch_size=vision.patch_size),
            ("pixels",),
            vit.EMBED_WEIGHTS,
        ),
        Region(
            "encoder_block",
            "encoder",
            partial(vit.block, num_heads=vision.num_heads, eps=eps, act=act),
            ("hidden",),
            vit.BLOCK_WEIGHTS + (vit.RELATIVE_WEIGHTS if relative else ()),
            layers=vision.num_layers,
        ),
        Region(
            "encoder_after",
            "encoder",
            partial(cross_kv.cross_kv, eps=eps if vision.final_norm else None),
            ("hidden", "slots", "key_cache", "value_cache"),
            (
                *(cross_kv.NORM_WEIGHTS if vision.final_norm else ()),
                *cross_kv.KV_WEIGHTS,
                *(cross_kv.PROJECTION_WEIGHTS if config.projected else ()),
            ),
        ),
    )


def _decoder(decoder: DecoderConfig) -> tuple[Region, Region, Region]:
    act, eps = activation(decoder.activation), decoder.layer_norm_eps
    match decoder:
        case Gpt2Config():
            scale = decoder.head_dim**-0.5 if decoder.scale_attention else 1.0
            functions: tuple[RegionFunction, RegionFunction, RegionFunction] = (
                gpt2.embed,
                partial(gpt2.block, eps=eps, scale=scale, act=act),
                partial(gpt2.head, eps=eps),
            )
            weights: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = (
                gpt2.EMBED_WEIGHTS,
                gpt2.BLOCK_WEIGHTS,
                gpt2.HEAD_WEIGHTS,
            )
        case BertConfig():
            head_act = None if decoder.head_activation is None else activation(decoder.head_activation)
            functions = (
                partial(bert.embed, scale=decoder.embedding_scale, eps=eps),
                partial(bert.block, num_heads=decoder.num_heads, eps=eps, scale=decoder.head_dim**-0.5, act=act),
                partial(bert.head, eps=eps, act=head_act),
            )
            weights = (
                bert.EMBED_WEIGHTS + (bert.EMBED_NORM_WEIGHTS if decoder.embedding_norm else ()),
                bert.BLOCK_WEIGHTS,
                (bert.TRANSFORM_WEIGHTS if head_act else ()) + bert.HEAD_WEIGHTS,
            )
        case _:
            raise TypeError(type(decoder).__name__)
    return (
        Region("decoder_before", "decoder", functions[0], ("tokens", "positions"), weights[0]),
        Region(
            "decoder_block",
            "decoder",
            functions[1],
            ("hidden", "positions", "key_cache", "value_cache", "cross_key", "cross_value"),
            weights[1],
            layers=decoder.num_layers,
        ),
        Region("decoder_after", "decoder", functions[2], ("hidden", "tokens", "positions", "forced"), weights[2]),
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
        caches = (torch.arange(rows, device=device), state.cross_key, state.cross_value)
        return (hidden,) if region.name == "encoder_block" else (hidden, *caches)
    if region.name == "decoder_before":
        return tokens, positions
    if region.on_demand:
        logits = torch.zeros(rows, config.decoder.vocab_size, device=device)
        ends, beams = logits[0] > 0, BeamState.allocate(state.slots, state.cache_length, device)
        scores = (logits, ends[:1]) if region.name == names.BEAMS else (logits,)
        return (*scores, *choice_inputs(region.name, state, beams, ends, rows))
    hidden = torch.zeros(rows, width, dtype=dtype, device=device)
    if region.name == "decoder_block":
        layer = state.layers(rows)[0]
        return hidden, positions, layer.key, layer.value, layer.cross_key, layer.cross_value
    return hidden, tokens, positions, state.forced[:rows]


def choice_inputs(name: str, state: DecodeState, beams: BeamState, ends: Tensor, rows: int) -> tuple[Tensor, ...]:
    """What a region that chooses tokens takes after the scores of ``rows``; ``ends`` [V] bool, as
    `beam_search.select` has it. Views of the buffers."""
    own = state.tokens[:rows], state.positions[:rows], state.forced[:rows]
    match name:
        case names.PENALTIES:
            return (*own, *beams.inputs(PENALISE_INPUTS, rows))
        case names.SAMPLING:
            return (*own, *state.sampling(rows), beams.sequences)
        case names.BEAMS:
            return (*own, ends, state.key, state.value, *beams.inputs(SELECT_INPUTS, rows))
    raise ValueError(name)
