"""Bounds the size of prepared weights by what a configuration implies, before room is made for them. No torch."""

from snapcap.models.config import ModelConfig
from snapcap.models.dimensions import DavitConfig, Florence2Config, VisionConfig

_ITEM_BYTES = 4  # bytes of an element of the widest dtype
_SLACK = 2  # biases, norms, what is turned around for a device, and what aligns tensors
_LEAST = 64 * 1024 * 1024


def most_bytes(config: ModelConfig) -> int:
    """More than the prepared weights of this configuration have on any device, and of the same order."""
    vision, decoder = config.vision, config.decoder
    encoder = _davit(vision) if isinstance(vision, DavitConfig) else _vit(vision)
    own, width = decoder.hidden_size, vision.hidden_size
    if isinstance(decoder, Florence2Config):
        encoder += decoder.encoder_layers * (4 * own * own + 2 * own * decoder.encoder_inner_size)
    crossed = 2 * own * (own + max(config.cross_size, width))
    attention = 2 * own * decoder.head_dim * (decoder.num_heads + decoder.kv_heads)
    decoder_layer = attention + crossed + 3 * own * decoder.inner_size  # three matrices: Llama has a gate
    shuffled = vision.sequence_length // vision.image_tokens  # patches that become one token, side by side
    rows = 2 * decoder.vocab_size + decoder.n_positions + config.prefix_length + own
    tables = own * rows + own * (shuffled + 1) * width
    elements = encoder + decoder.num_layers * decoder_layer + tables
    return max(_LEAST, _SLACK * _ITEM_BYTES * elements)


def _vit(vision: VisionConfig) -> int:
    tokens, width = vision.sequence_length, vision.hidden_size
    patch = vision.patch_size[0] * vision.patch_size[1] * vision.num_channels
    # Each layer of BEiT may have a bias for each pair of tokens.
    layer = 4 * width * width + 2 * width * vision.intermediate_size + vision.num_heads * tokens * tokens
    return width * (patch + tokens) + vision.num_layers * layer


def _davit(vision: DavitConfig) -> int:
    total = vision.hidden_size * vision.sequence_length
    for stage in vision.stages:
        width = stage.hidden_size
        half = 4 * width * width + 2 * width * (stage.inner_size + 9)
        total += stage.kernel**2 * stage.input_size * width + 2 * stage.num_layers * half
    return total
