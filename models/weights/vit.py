"""Arranges a ViT encoder's tensors in the order its regions take them."""

import torch

from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import ClipConfig, VisionConfig
from snapcap.models.weights.source import WeightSet, WeightSource


@dataclass(frozen=True)
class Normalisation:
    """What the image processor does to a pixel value x: (x * rescale - mean) / std, per channel."""

    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


def embed(take: WeightSource, vision: VisionConfig, normalisation: Normalisation) -> WeightSet:
    """For ``vit.embed``. DeiT's distillation token goes with the class token: both stand before the patches."""
    around = _clip_tokens(take, vision) if isinstance(vision, ClipConfig) else _tokens(take, vision)
    return *patch(take, vision, normalisation), *around


def patch(take: WeightSource, vision: VisionConfig, normalisation: Normalisation) -> WeightSet:
    """The statistics of pixels, and what embeds a patch, as a matrix [width, 3 * height * breadth]."""
    width, (height, breadth) = vision.hidden_size, vision.patch_size
    weight = take.raw("encoder.patch.weight", width, 3, height, breadth).reshape(width, 3 * height * breadth)
    return *statistics(take, normalisation), take.turned(take.place(weight))


def statistics(take: WeightSource, normalisation: Normalisation) -> WeightSet:
    """What pixels are normalised with, in fp32."""
    each = ([normalisation.rescale], normalisation.mean, normalisation.std)
    return tuple(take.place(torch.tensor(values), torch.float32) for values in each)


def _tokens(take: WeightSource, vision: VisionConfig) -> WeightSet:
    """The patches' bias, what stands before them, and positions."""
    length, width = vision.output_shape
    leading = [take.raw("encoder.class_token", 1, 1, width)]
    if vision.leading_tokens == 2:
        leading.append(take.raw("encoder.distillation_token", 1, 1, width))
    position = take.raw("encoder.position", 1, length, width) if vision.positions else torch.zeros(1, length, width)
    return take("encoder.patch.bias", width), take.place(torch.cat(leading, dim=1)), take.place(position)


def _clip_tokens(take: WeightSource, vision: ClipConfig) -> WeightSet:
    """The same and the norm that follows; without a bias the region adds zeros."""
    length, width = vision.output_shape
    return (
        take.place(torch.zeros(width)),
        take.place(take.raw("encoder.class_token", width).view(1, 1, width)),
        take.place(take.raw("encoder.position", length, width).view(1, length, width)),
        *take.affine("encoder.embed_norm", width),
    )


def block(take: WeightSource, vision: VisionConfig, layer: int) -> WeightSet:
    """For ``vit.block``."""
    width, inner, name = vision.hidden_size, vision.intermediate_size, f"encoder.layer.{layer}"
    return (
        *take.affine(f"{name}.norm1", width),
        *_qkv(take, vision, name),
        *take.wide(f"{name}.out", width, width),
        *take.affine(f"{name}.norm2", width),
        *take.wide(f"{name}.fc1", inner, width),
        *take.wide(f"{name}.fc2", width, inner),
    )


def _qkv(take: WeightSource, vision: VisionConfig, name: str) -> WeightSet:
    width = vision.hidden_size
    if vision.fused_qkv:
        return take.wide(f"{name}.qkv", 3 * width, width)
    projections = [f"{name}.{projection}" for projection in ("query", "key", "value")]
    weight = take.turned(take.stacked([f"{projection}.weight" for projection in projections], width, width))
    # Without qkv_bias the region adds zeros: one region for both, and the sum is exact.
    if not vision.qkv_bias:
        return weight, take.place(torch.zeros(3 * width))
    return weight, take.stacked([f"{projection}.bias" for projection in projections], width)
