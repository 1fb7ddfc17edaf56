"""Loads BEiT's encoder (Bao et al., 2021), whose regions are those of `layers.vit`.

A block has a bias for each pair of positions if attention has one.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import BeitConfig
from snapcap.models.layers import vit
from snapcap.models.layers.weights import NamedWeights, WeightSource

regions = vit.regions


def weights(take: WeightSource, config: ModelConfig) -> Mapping[str, list[NamedWeights]]:
    """Returns the weights of the encoder's regions. All layers without a bias table of their own share one
    tensor."""
    vision = cast(BeitConfig, config.vision)
    before = vit.weights_before(take, vision)
    index = relative_index(*vision.grid)
    shared = _table(take, "encoder.relative", vision) if vision.shared_bias else None
    biases: dict[str, Tensor] = {}

    def relative(layer: int) -> NamedWeights:
        own = _table(take, f"encoder.layer.{layer}.relative", vision) if vision.layer_bias else None
        table = own if shared is None else shared if own is None else shared + own
        if table is None:
            return {}
        name = "shared" if own is None else str(layer)
        if name not in biases:
            biases[name] = take.place(table[index].permute(2, 0, 1).unsqueeze(0))
        return {"relative": biases[name]}

    blocks = [{**_block(take, vision, layer), **relative(layer)} for layer in range(vision.num_layers)]
    return {"encoder_before": [before], "encoder_block": blocks}


def relative_index(rows: int, columns: int) -> Tensor:
    """Returns the row of the bias table for each pair of tokens: [S, S] int64.

    The table has (2 rows - 1) (2 columns - 1) rows for the distances of two patches. Three more rows follow: class
    token to patch, patch to class token, and class token to itself.
    """
    distances = (2 * rows - 1) * (2 * columns - 1)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    y, x = y.flatten(), x.flatten()
    index = torch.empty(rows * columns + 1, rows * columns + 1, dtype=torch.int64)
    down, across = y[:, None] - y[None, :] + rows - 1, x[:, None] - x[None, :] + columns - 1
    index[1:, 1:] = down * (2 * columns - 1) + across
    index[0, :], index[:, 0], index[0, 0] = distances, distances + 1, distances + 2
    return index


def _table(take: WeightSource, name: str, vision: BeitConfig) -> Tensor:
    rows, columns = vision.grid
    return take.raw(name, (2 * rows - 1) * (2 * columns - 1) + 3, vision.num_heads)


def _block(take: WeightSource, vision: BeitConfig, layer: int) -> NamedWeights:
    width, inner, name = vision.hidden_size, vision.intermediate_size, f"encoder.layer.{layer}"
    projections = [f"{name}.{projection}.weight" for projection in ("query", "key", "value")]
    # A key's bias would be the same for every key, and so change no softmax. BEiT has none.
    query, value = (take.raw(f"{name}.{part}.bias", width) for part in ("query", "value"))
    return {
        **take.affine("norm1", f"{name}.norm1", width),
        "qkv_weight": take.turned(take.stacked(projections, width, width)),
        "qkv_bias": take.place(torch.cat([query, torch.zeros_like(query), value])),
        **_scaled(take, "out", f"{name}.out", f"{name}.scale1", vision, width),
        **take.affine("norm2", f"{name}.norm2", width),
        **take.wide("fc1", f"{name}.fc1", inner, width),
        **_scaled(take, "fc2", f"{name}.fc2", f"{name}.scale2", vision, inner),
    }


def _scaled(take: WeightSource, ours: str, name: str, scale: str, vision: BeitConfig, inputs: int) -> NamedWeights:
    """Returns a linear layer with the layer scale behind it multiplied in: λ (W x + b) = (λ W) x + λ b."""
    width = vision.hidden_size
    if not vision.layer_scale:
        return take.wide(ours, name, width, inputs)
    factor = take.raw(scale, width)
    weight, bias = take.raw(f"{name}.weight", width, inputs), take.raw(f"{name}.bias", width)
    return {
        f"{ours}_weight": take.turned(take.place(factor.unsqueeze(1) * weight)),
        f"{ours}_bias": take.place(factor * bias),
    }
