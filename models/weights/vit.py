"""Arranges a ViT encoder's tensors in the order its regions take them."""

import torch

from snapcap.models.dataclass import dataclass
from snapcap.models.dimensions import ClipConfig, VisionConfig
from snapcap.models.weights.source import WeightSet, WeightSource


@dataclass(frozen=True)
class Normalisation:
    """Normalisation of a pixel value x by the image processor: (x * rescale - mean) / std, for each channel."""

    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


def embed(take: WeightSource, vision: VisionConfig, normalisation: Normalisation) -> WeightSet:
    """Returns the weights of ``vit.embed``. DeiT's distillation token is joined to the class token before the
    patches."""
    around = _clip_tokens(take, vision) if isinstance(vision, ClipConfig) else _tokens(take, vision)
    return *patch(take, vision, normalisation), *around


def patch(take: WeightSource, vision: VisionConfig, normalisation: Normalisation) -> WeightSet:
    """Returns the statistics of pixels, and the patch embedding as a matrix [width, 3 * height * breadth]."""
    width, (height, breadth) = vision.hidden_size, vision.patch_size
    weight = take.raw("encoder.patch.weight", width, 3, height, breadth).reshape(width, 3 * height * breadth)
    return *statistics(take, normalisation), take.turned(take.place(weight))


def statistics(take: WeightSource, normalisation: Normalisation) -> WeightSet:
    """Returns rescale, mean and std of pixels, in fp32."""
    each = ([normalisation.rescale], normalisation.mean, normalisation.std)
    return tuple(take.place(torch.tensor(values), torch.float32) for values in each)


def _tokens(take: WeightSource, vision: VisionConfig) -> WeightSet:
    """Returns the patches' bias, the tokens before the patches, and positions."""
    length, width = vision.output_shape
    leading = [take.raw("encoder.class_token", 1, 1, width)]
    if vision.leading_tokens == 2:
        leading.append(take.raw("encoder.distillation_token", 1, 1, width))
    position = take.raw("encoder.position", 1, length, width) if vision.positions else torch.zeros(1, length, width)
    return take("encoder.patch.bias", width), take.place(torch.cat(leading, dim=1)), take.place(position)


def _clip_tokens(take: WeightSource, vision: ClipConfig) -> WeightSet:
    """Returns the same for CLIP, and the norm that follows. CLIP's patches have no bias and get zeros."""
    length, width = vision.output_shape
    return (
        take.place(torch.zeros(width)),
        take.place(take.raw("encoder.class_token", width).view(1, 1, width)),
        take.place(take.raw("encoder.position", length, width).view(1, length, width)),
        *take.affine("encoder.embed_norm", width),
    )


def block(take: WeightSource, vision: VisionConfig, layer: int) -> WeightSet:
    """Returns the weights of ``vit.block``."""
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
    # Without qkv_bias the region adds zeros, which is exact, so one region serves both cases.
    if not vision.qkv_bias:
        return weight, take.place(torch.zeros(3 * width))
    return weight, take.stacked([f"{projection}.bias" for projection in projections], width)
