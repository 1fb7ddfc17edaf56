"""Binds a checkpoint's dimensions to the functions that its regions are."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import BertConfig, DecoderConfig, GitConfig, Gpt2Config
from snapcap.models.regions import bert, cross_kv, git, gpt2, names, vit
from snapcap.models.regions.activations import activation
from snapcap.models.regions.choice import beam_search
from snapcap.models.regions.choice.penalties import penalise
from snapcap.models.regions.choice.sampling import sample

RegionFunction = Callable[..., Tensor]


def region_functions(config: ModelConfig) -> Mapping[str, RegionFunction]:
    """By region name; no tensor is touched."""
    vision = config.vision
    act, eps = activation(vision.activation), vision.layer_norm_eps
    return {
        "encoder_before": partial(vit.embed, grid=vision.grid, patch_size=vision.patch_size, eps=eps),
        "encoder_block": partial(vit.block, num_heads=vision.num_heads, eps=eps, act=act),
        "encoder_after": partial(cross_kv.cross_kv, eps=eps if vision.final_norm else None),
        **_decoder(config.decoder),
        **_prefix(config),
        names.PENALTIES: penalise,
        names.SAMPLING: sample,
        names.BEAMS: beam_search.select,
    }


def _decoder(decoder: DecoderConfig) -> Mapping[str, RegionFunction]:
    act, eps = activation(decoder.activation), decoder.layer_norm_eps
    match decoder:
        case Gpt2Config():
            scale = decoder.head_dim**-0.5 if decoder.scale_attention else 1.0
            return {
                "decoder_before": gpt2.embed,
                "decoder_block": partial(gpt2.block, eps=eps, scale=scale, act=act),
                "decoder_after": partial(gpt2.head, eps=eps),
            }
        case BertConfig():
            head_act = None if decoder.head_activation is None else activation(decoder.head_activation)
            scale, heads = decoder.head_dim**-0.5, decoder.num_heads
            block = git.block if isinstance(decoder, GitConfig) else bert.block
            return {
                "decoder_before": partial(bert.embed, scale=decoder.embedding_scale, eps=eps),
                "decoder_block": partial(block, num_heads=heads, eps=eps, scale=scale, act=act),
                "decoder_after": partial(bert.head, eps=eps, act=head_act),
            }
    raise TypeError(type(decoder).__name__)


def _prefix(config: ModelConfig) -> Mapping[str, RegionFunction]:
    decoder = config.decoder
    if not isinstance(decoder, GitConfig):
        return {}
    act, heads = activation(decoder.activation), decoder.num_heads
    return {
        "prefix_before": partial(git.project, eps=config.vision.layer_norm_eps),
        "prefix_block": partial(git.prefix_block, num_heads=heads, eps=decoder.layer_norm_eps, act=act),
        "prefix_after": git.prefix_end,
    }
