"""Loads a checkpoint's tensors onto the device, in the order the regions take them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import (
    BeitConfig,
    BertConfig,
    DavitConfig,
    Florence2Config,
    GitConfig,
    Gpt2Config,
    LlamaConfig,
    LlavaConfig,
    SiglipConfig,
    VisionConfig,
)
from snapcap.models.regions.names import ON_DEMAND
from snapcap.models.weights import bart as bart_weights
from snapcap.models.weights import beit as beit_weights
from snapcap.models.weights import bert as bert_weights
from snapcap.models.weights import davit as davit_weights
from snapcap.models.weights import gpt2 as gpt2_weights
from snapcap.models.weights import llama as llama_weights
from snapcap.models.weights import siglip as siglip_weights
from snapcap.models.weights import vit as vit_weights
from snapcap.models.weights.files import read_tensors
from snapcap.models.weights.listing import WeightsError
from snapcap.models.weights.sets import Weights
from snapcap.models.weights.source import WeightSet, WeightSource
from snapcap.models.weights.upload import upload
from snapcap.models.weights.vit import Normalisation

__all__ = ["Normalisation", "WeightSet", "Weights", "load_weights", "weight_bytes"]


def weight_bytes(weights: Weights[Tensor]) -> int:
    """Returns the bytes of all weights on the device. A tied tensor counts once."""
    unique = {t.data_ptr(): t.nbytes for layers in weights.sets.values() for layer in layers for t in layer}
    return sum(unique.values())


def load_weights(
    folder: Path,
    config: ModelConfig,
    normalisation: Normalisation,
    device: torch.device,
    dtype: torch.dtype,
    layout: str | None = None,
) -> Weights[Tensor]:
    """Reads a checkpoint folder (safetensors or ``.bin``, one file or sharded) into region weights.

    A tensor that is missing, left over, or of another shape is an error that names it.

    Args:
        dtype: the dtype of the weights; statistics of pixels and rotary frequencies are fp32.
        layout: the type of the device that will read the weights, cpu or cuda. None is the type of ``device``.

    Raises:
        WeightsError: the files cannot be read or do not fit the configuration.
    """
    tensors = read_tensors(folder)
    theirs = _distinct(tensors, config)
    take = WeightSource(
        upload({ours: tensors[name] for ours, name in theirs.items()}, device),
        theirs,
        config.names,
        device,
        dtype,
        layout or device.type,
        tied_head=config.decoder.tied_head,
    )
    sets = {
        **_vision(take, config.vision, normalisation),
        **_decoder(take, config),
        **dict.fromkeys(ON_DEMAND, ((),)),
    }
    take.finish()
    return Weights(sets)


def _distinct(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, str]:
    """Returns the checkpoint's name of each tensor, by snapcap's name.

    Raises:
        WeightsError: two different tensors have the same name in snapcap, such as with and without a prefix, or a
            tensor belongs to an adapter.
    """
    theirs: dict[str, str] = {}
    for name, ours in config.names.canonical(tensors).items():
        if ".lora_" in name or ".base_layer." in name:
            raise WeightsError(
                f"the checkpoint has tensors of a PEFT adapter, such as {name!r}; save the model anew after "
                "merge_and_unload()"
            )
        other = theirs.setdefault(ours, name)
        one, two = tensors[other], tensors[name]
        if one is not two and not (one.dtype == two.dtype and torch.equal(one, two)):
            raise WeightsError(f"the checkpoint has {other!r} and {name!r}, which are one tensor, and they differ")
    return theirs


def _vision(
    take: WeightSource, vision: VisionConfig, normalisation: Normalisation
) -> dict[str, tuple[WeightSet, ...]]:
    if isinstance(vision, DavitConfig):
        return davit_weights.stages(take, vision, normalisation)
    return {
        "encoder_before": (
            siglip_weights.embed(take, vision, normalisation)
            if isinstance(vision, SiglipConfig)
            else vit_weights.embed(take, vision, normalisation),
        ),
        "encoder_block": beit_weights.blocks(take, vision)
        if isinstance(vision, BeitConfig)
        else tuple(vit_weights.block(take, vision, layer) for layer in range(vision.num_layers)),
    }


def _decoder(take: WeightSource, config: ModelConfig) -> dict[str, tuple[WeightSet, ...]]:
    decoder, outer = config.decoder, config.vision.hidden_size
    layers = range(decoder.num_layers)
    blocks: tuple[WeightSet, ...]
    match decoder:
        case Gpt2Config():
            embed = gpt2_weights.embed(take, decoder)
            blocks = tuple(gpt2_weights.block(take, decoder, layer) for layer in layers)
            head = gpt2_weights.head(take, decoder, embed[0])
            cross = gpt2_weights.cross_kv(take, decoder)
        case LlamaConfig():
            return _llama(take, config, decoder)
        case GitConfig():
            embed = bert_weights.embed(take, decoder)
            blocks = tuple(bert_weights.block(take, decoder, layer) for layer in layers)
            head = bert_weights.head(take, decoder, embed[0])
            return {
                **_git_prefix(take, config, blocks),
                "decoder_before": (embed,),
                "decoder_block": blocks,
                "decoder_after": (head,),
            }
        case BertConfig():
            embed = bert_weights.embed(take, decoder)
            blocks = tuple(bert_weights.block(take, decoder, layer) for layer in layers)
            head = bert_weights.head(take, decoder, embed[0])
            cross = bert_weights.cross_kv(take, decoder, config.cross_size)
            if isinstance(decoder, Florence2Config):
                token, *positions = embed
                return {
                    **bart_weights.prefix(take, config, decoder, take.copy("text_encoder.token", token)),
                    "encoder_after": (cross,),
                    "decoder_before": ((take.copy("decoder.own_token", token), *positions),),
                    "decoder_block": blocks,
                    "decoder_after": (head,),
                }
        case _:
            raise TypeError(type(decoder).__name__)
    projection = take.wide("projection", decoder.hidden_size, outer) if config.projected else ()
    norm = take.affine("encoder.norm", outer) if config.vision.final_norm else ()
    return {
        "encoder_after": ((*norm, *cross, *projection),),
        "decoder_before": (embed,),
        "decoder_block": blocks,
        "decoder_after": (head,),
    }


def _git_prefix(
    take: WeightSource, config: ModelConfig, blocks: tuple[WeightSet, ...]
) -> dict[str, tuple[WeightSet, ...]]:
    """Returns the weights of GIT's prefix: of ``git.project``, and of the decoder's own blocks."""
    inputs, width = config.vision.hidden_size, config.decoder.hidden_size
    projection = (
        *take.affine("encoder.norm", inputs),
        *take.affine("projection", width, inputs),
        *take.affine("projection_norm", width),
    )
    *before, (qkv_weight, qkv_bias, *_) = blocks
    block = {"prefix_block": tuple(before)} if before else {}
    return {"prefix_before": (projection,), **block, "prefix_after": ((qkv_weight, qkv_bias),)}


def _llama(take: WeightSource, config: ModelConfig, decoder: LlamaConfig) -> dict[str, tuple[WeightSet, ...]]:
    """Returns the weights of ``llama``'s regions, and of the projector between encoder and decoder."""
    embed = llama_weights.embed(take, decoder)
    blocks = llama_weights.blocks(take, decoder)
    prefix = llama_weights.prefix(take, config.prefix, embed[0])
    return {
        "prefix_before": ((*_connector(take, config.vision, decoder), *embed, *prefix),),
        **({"prefix_block": blocks[:-1]} if len(blocks) > 1 else {}),
        "prefix_after": (llama_weights.prefix_end(blocks[-1]),),
        "decoder_before": (embed,),
        "decoder_block": blocks,
        "decoder_after": (llama_weights.head(take, decoder, embed[0]),),
    }


def _connector(take: WeightSource, vision: VisionConfig, decoder: LlamaConfig) -> WeightSet:
    if isinstance(decoder, LlavaConfig):
        return llama_weights.projection(take, decoder, vision.hidden_size)
    if isinstance(vision, SiglipConfig):
        return siglip_weights.projection(take, vision, decoder.hidden_size)
    raise TypeError(type(vision).__name__)
