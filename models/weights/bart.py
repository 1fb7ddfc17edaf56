"""Arranges the tensors of Florence-2's prefix in the order its regions take them."""

import torch
from torch import Tensor

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import DavitConfig, Florence2Config
from snapcap.models.weights.source import WeightSet, WeightSource


def prefix(
    take: WeightSource, config: ModelConfig, decoder: Florence2Config, token: Tensor
) -> dict[str, tuple[WeightSet, ...]]:
    """Returns the weights of ``bart.embed`` and ``bart.block``, by region. ``token`` is the embedding on the
    device."""
    width, vision = decoder.hidden_size, config.vision
    if not isinstance(vision, DavitConfig):
        raise TypeError(type(vision).__name__)
    rows = decoder.n_positions + decoder.position_offset
    position = take.raw("text_encoder.position", rows, width)
    first = decoder.position_offset
    before = (
        take.place(_image_position(take, vision)),
        _projection(take, width, vision.hidden_size),
        *take.affine("projection_norm", width),
        token,
        take.place(position[first : first + config.prefix_length]),
        *take.affine("text_encoder.embed_norm", width),
    )
    layers = range(decoder.encoder_layers)
    return {"prefix_before": (before,), "prefix_block": tuple(_block(take, decoder, layer) for layer in layers)}


def _image_position(take: WeightSource, vision: DavitConfig) -> Tensor:
    """Returns the positions [tokens, D] of the last stage's tokens.

    A position is the embeddings of the token's column and row, side by side, plus the temporal embedding of a
    video's first image: sine and cosine of 0 in turn.
    """
    (rows, columns), width = vision.grid, vision.hidden_size
    half = width // 2
    row = take.raw("projection.row", vision.position_rows, half)[:rows]
    column = take.raw("projection.column", vision.position_rows, width - half)[:columns]
    by_column = column.unsqueeze(0).expand(rows, -1, -1)
    by_row = row.unsqueeze(1).expand(-1, columns, -1)
    first = torch.arange(width, device=row.device) % 2
    return torch.cat((by_column, by_row), dim=-1).flatten(0, 1).float() + first


def _projection(take: WeightSource, width: int, inputs: int) -> Tensor:
    """Returns the projection as [out, in]. Older files hold its transpose, under another name."""
    if take.has("projection.transposed"):
        return take.place(take.raw("projection.transposed", inputs, width).t())
    return take("projection.weight", width, inputs)


def _block(take: WeightSource, decoder: Florence2Config, layer: int) -> WeightSet:
    width, inner, name = decoder.hidden_size, decoder.encoder_inner_size, f"text_encoder.layer.{layer}"
    projections = [f"{name}.{projection}" for projection in ("query", "key", "value")]
    return (
        take.stacked([f"{projection}.weight" for projection in projections], width, width),
        take.stacked([f"{projection}.bias" for projection in projections], width),
        *take.affine(f"{name}.out", width, width),
        *take.affine(f"{name}.norm1", width),
        *take.affine(f"{name}.fc1", inner, width),
        *take.affine(f"{name}.fc2", width, inner),
        *take.affine(f"{name}.norm2", width),
    )
