"""Binds a checkpoint's dimensions to the functions of its regions."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import (
    BertConfig,
    DavitConfig,
    DecoderConfig,
    Florence2Config,
    GitConfig,
    Gpt2Config,
    LlamaConfig,
    LlavaConfig,
    SiglipConfig,
    VisionConfig,
)
from snapcap.models.regions import bert, gpt2, names, vit
from snapcap.models.regions.choice import beam_search
from snapcap.models.regions.choice.penalties import penalise
from snapcap.models.regions.choice.sampling import sample
from snapcap.models.regions.florence2 import bart, davit
from snapcap.models.regions.layers.activations import activation
from snapcap.models.regions.prefix import git, llama, llava, siglip
from snapcap.models.regions.state import cross_kv

RegionFunction = Callable[..., Tensor]


def region_functions(config: ModelConfig) -> Mapping[str, RegionFunction]:
    """Returns the function of each region by the region's name. Touches no tensor."""
    vision = config.vision
    return {
        **(_davit(vision) if isinstance(vision, DavitConfig) else _vit(vision)),
        "encoder_after": partial(cross_kv.cross_kv, eps=vision.layer_norm_eps if vision.final_norm else None),
        **_decoder(config.decoder),
        **_prefix(config),
        names.PENALTIES: penalise,
        names.SAMPLING: sample,
        names.BEAMS: beam_search.select,
    }


def _vit(vision: VisionConfig) -> Mapping[str, RegionFunction]:
    act, eps = activation(vision.activation), vision.layer_norm_eps
    return {
        "encoder_before": _embed(vision),
        "encoder_block": partial(vit.block, num_heads=vision.num_heads, eps=eps, act=act),
    }


def _embed(vision: VisionConfig) -> RegionFunction:
    if isinstance(vision, SiglipConfig):
        return partial(siglip.embed, grid=vision.grid, patch_size=vision.patch_size)
    return partial(vit.embed, grid=vision.grid, patch_size=vision.patch_size, eps=vision.layer_norm_eps)


def _davit(vision: DavitConfig) -> Mapping[str, RegionFunction]:
    act, eps = activation(vision.activation), vision.layer_norm_eps
    functions: dict[str, RegionFunction] = {}
    grid: tuple[int, int] | None = None
    for number, stage in enumerate(vision.stages, 1):
        before, block = names.stage(number)
        embed = davit.embed_pixels if grid is None else partial(davit.embed, grid=grid)
        functions[before] = partial(
            embed,
            kernel=stage.kernel,
            stride=stage.stride,
            padding=stage.padding,
            norm_first=stage.norm_first,
            eps=eps,
        )
        grid = stage.grid
        functions[block] = partial(
            davit.block,
            grid=grid,
            window=vision.window,
            num_heads=stage.num_heads,
            groups=stage.groups,
            eps=eps,
            act=act,
        )
    return functions


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
            block: RegionFunction = bert.block
            if isinstance(decoder, GitConfig):
                block = git.block
            elif isinstance(decoder, Florence2Config):
                block = bart.decoder_block
            return {
                "decoder_before": partial(bert.embed, scale=decoder.embedding_scale, eps=eps),
                "decoder_block": partial(block, num_heads=heads, eps=eps, scale=scale, act=act),
                "decoder_after": partial(bert.head, eps=eps, act=head_act),
            }
        case LlamaConfig():
            return {
                "decoder_before": llama.embed,
                "decoder_block": partial(llama.block, eps=eps, scale=decoder.head_dim**-0.5, act=act),
                "decoder_after": partial(llama.head, eps=eps),
            }
    raise TypeError(type(decoder).__name__)


def _prefix(config: ModelConfig) -> Mapping[str, RegionFunction]:
    vision, decoder = config.vision, config.decoder
    act, eps = activation(decoder.activation), decoder.layer_norm_eps
    match decoder:
        case GitConfig():
            return {
                "prefix_before": partial(git.project, eps=vision.layer_norm_eps),
                "prefix_block": partial(git.prefix_block, num_heads=decoder.num_heads, eps=eps, act=act),
                "prefix_after": git.prefix_end,
            }
        case LlamaConfig():
            return {
                "prefix_before": _connector(vision, decoder),
                "prefix_block": partial(llama.prefix_block, eps=eps, act=act),
                "prefix_after": partial(llama.prefix_end, eps=eps),
            }
        case Florence2Config():
            return _bart(decoder, vision)
    return {}


def _connector(vision: VisionConfig, decoder: LlamaConfig) -> RegionFunction:
    """Returns the function that projects the encoder's tokens into the space of Llama's layers."""
    if isinstance(decoder, LlavaConfig):
        act = activation(decoder.projector_activation)
        return partial(llava.project, skipped=vision.skipped_tokens, act=act)
    if isinstance(vision, SiglipConfig):
        side, eps = vision.pixel_shuffle, vision.layer_norm_eps
        return partial(siglip.project, grid=vision.grid, pixel_shuffle=side, eps=eps)
    raise TypeError(type(vision).__name__)


def _bart(decoder: Florence2Config, vision: VisionConfig) -> Mapping[str, RegionFunction]:
    act, heads, eps = activation(decoder.activation), decoder.encoder_heads, decoder.layer_norm_eps
    scale = decoder.embedding_scale
    return {
        "prefix_before": partial(bart.embed, scale=scale, projection_eps=vision.layer_norm_eps, eps=eps),
        "prefix_block": partial(bart.block, num_heads=heads, eps=eps, act=act),
    }
