"""Reads GPT-2 decoders of a vision-encoder-decoder (`GPT2LMHeadModel` with cross-attention)."""

from snapcap.models.dimensions import Gpt2Config
from snapcap.models.fields import Fields
from snapcap.models.names import Names

NAMES = Names(
    rules=(
        (r"decoder\.transformer\.(wte|wpe|ln_f|h)\.(.+)", r"decoder.\1.\2"),
        (r"decoder\.lm_head\.weight", "decoder.lm_head.weight"),
    ),
    unused=(r"decoder\.transformer\.h\.\d+\.(attn|crossattention)\.(bias|masked_bias)",),  # masks of old versions
)


def read(fields: Fields) -> Gpt2Config:
    """Reads the decoder's dimensions.

    Raises:
        ConfigError: a field has a value that is not supported.
    """
    fields.require("model_type", "gpt2")
    fields.require(
        "add_cross_attention", True, "a decoder without cross-attention cannot see the image", default=True
    )
    fields.require("scale_attn_by_inverse_layer_idx", False, "one region serves every layer", default=False)
    hidden = fields.positive_int("n_embd", 768)
    inner = fields.values.get("n_inner")
    return Gpt2Config(
        family="gpt2",
        vocab_size=fields.positive_int("vocab_size", 50257),
        n_positions=fields.positive_int("n_positions", 1024),
        hidden_size=hidden,
        num_layers=fields.layers("n_layer", 12),
        num_heads=fields.heads("n_head", 12, hidden, "n_embd"),
        inner_size=4 * hidden if inner is None else fields.positive_int("n_inner"),
        activation=fields.activation("activation_function", "gelu_new"),
        layer_norm_eps=fields.positive_number("layer_norm_epsilon", 1e-5),
        scale_attention=fields.switch("scale_attn_weights", True),
        tied_head=fields.switch("tie_word_embeddings", True),
    )
