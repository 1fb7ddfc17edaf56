"""Bounds the size of prepared weights by what a configuration implies, before room is made for them. No torch."""

from snapcap.models.config import ModelConfig

_ITEM_BYTES = 4  # bytes of an element of the widest dtype
_SLACK = 2  # biases, norms, what is turned around for a device, and what aligns tensors
_LEAST = 64 * 1024 * 1024


def most_bytes(config: ModelConfig) -> int:
    """More than the prepared weights of this configuration have on any device, and of the same order."""
    vision, decoder = config.vision, config.decoder
    own, width = decoder.hidden_size, vision.hidden_size
    crossed = 2 * own * (own + max(config.cross_size, width))
    attention = 2 * own * decoder.head_dim * (decoder.num_heads + decoder.kv_heads)
    decoder_layer = attention + crossed + 3 * own * decoder.inner_size  # three matrices: Llama has a gate
    shuffled = vision.sequence_length // vision.image_tokens  # patches that become one token, side by side
    rows = 2 * decoder.vocab_size + decoder.n_positions + config.prefix_length + own
    tables = own * rows + own * (shuffled + 1) * width
    elements = vision.weights + decoder.prefix_weights + decoder.num_layers * decoder_layer + tables
    return max(_LEAST, _SLACK * _ITEM_BYTES * elements)
