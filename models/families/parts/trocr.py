"""Reads TrOCR's decoder (`TrOCRForCausalLM`): BART's, with a plain head and learned or sinusoidal positions."""

from snapcap.models.dimensions import BertConfig
from snapcap.models.fields import Fields, is_whole
from snapcap.models.names import Names

_LEARNED_OFFSET = 2  # rows of the learned table before the first token's row, as in fairseq

_LAYER = r"decoder\.model\.decoder\.layers\.(\d+)"
_PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}

NAMES = Names(
    rules=(
        (r"decoder\.model\.decoder\.embed_tokens\.weight", "decoder.token"),
        (r"decoder\.model\.decoder\.embed_positions\.weight", "decoder.position"),
        (r"decoder\.model\.decoder\.layernorm_embedding\.(\w+)", r"decoder.embed_norm.\1"),
        *(
            (rf"{_LAYER}\.self_attn\.{theirs}\.(\w+)", rf"decoder.layer.\1.{ours}.\2")
            for theirs, ours in _PROJECTIONS.items()
        ),
        *(
            (rf"{_LAYER}\.encoder_attn\.{theirs}\.(\w+)", rf"decoder.layer.\1.cross_{ours}.\2")
            for theirs, ours in _PROJECTIONS.items()
        ),
        (rf"{_LAYER}\.self_attn_layer_norm\.(\w+)", r"decoder.layer.\1.norm1.\2"),
        (rf"{_LAYER}\.encoder_attn_layer_norm\.(\w+)", r"decoder.layer.\1.norm_cross.\2"),
        (rf"{_LAYER}\.(fc1|fc2)\.(\w+)", r"decoder.layer.\1.\2.\3"),
        (rf"{_LAYER}\.final_layer_norm\.(\w+)", r"decoder.layer.\1.norm2.\2"),
        (r"decoder\.output_projection\.weight", "decoder.head.weight"),
    ),
    # Buffers of older versions.
    unused=(r"decoder\.model\.decoder\.(version|embed_positions\.(_float_tensor|weights))",),
)


def read(fields: Fields) -> BertConfig:
    """Reads the decoder's dimensions.

    Raises:
        ConfigError: a field has a value that is not supported.
    """
    fields.require(
        "add_cross_attention", True, "a decoder without cross-attention cannot see the image", default=True
    )
    hidden = fields.positive_int("d_model", 1024)
    learned = fields.switch("use_learned_position_embeddings", True)
    padding = fields.values.get("pad_token_id", 1)
    if not is_whole(padding) or padding < 0:
        raise fields.error("pad_token_id", padding, "a token id is expected: positions are counted from it")
    return BertConfig(
        family="trocr",
        vocab_size=fields.positive_int("vocab_size", 50265),
        n_positions=fields.positive_int("max_position_embeddings", 512),
        hidden_size=hidden,
        num_layers=fields.layers("decoder_layers", 12),
        num_heads=fields.heads("decoder_attention_heads", 16, hidden, "d_model"),
        inner_size=fields.positive_int("decoder_ffn_dim", 4096),
        activation=fields.activation("activation_function", "gelu"),
        layer_norm_eps=1e-5,  # the default of torch.nn.LayerNorm, because there is no field for it
        tied_head=fields.switch("tie_word_embeddings", True),
        embedding_scale=hidden**0.5 if fields.switch("scale_embedding", False) else 1.0,
        embedding_norm=fields.switch("layernorm_embedding", True),
        head_bias=False,
        position_offset=_LEARNED_OFFSET if learned else padding + 1,
        learned_positions=learned,
    )
