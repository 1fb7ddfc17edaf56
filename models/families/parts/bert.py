"""Reads decoders of a vision-encoder-decoder with BERT's blocks, and the parts that other families share with BERT.

The classes are `BertLMHeadModel`, `RobertaForCausalLM` and `TrOCRForCausalLM`, with cross-attention. RoBERTa
differs from BERT in three ways: positions begin after the padding token's, the head's activation is always gelu,
and its tensors have other names. TrOCR has BART's decoder, with a plain head and learned or sinusoidal positions.
"""

from typing import Any

from snapcap.models.dimensions import BertConfig
from snapcap.models.fields import Fields, is_whole
from snapcap.models.names import Names, Rule

SEES_NO_IMAGE = "a decoder without cross-attention cannot see the image"


def layer_names(model: str) -> tuple[Rule, ...]:
    """Returns the renaming rules of embeddings and layers of BERT's module tree under ``model``.

    ``model`` is a pattern such as ``decoder\\.bert``.
    """
    embeddings, layer = rf"{model}\.embeddings", rf"{model}\.encoder\.layer\.(\d+)"
    return (
        (rf"{embeddings}\.word_embeddings\.weight", "decoder.token"),
        (rf"{embeddings}\.position_embeddings\.weight", "decoder.position"),
        (rf"{embeddings}\.token_type_embeddings\.weight", "decoder.token_type"),
        (rf"{embeddings}\.LayerNorm\.(\w+)", r"decoder.embed_norm.\1"),
        (rf"{layer}\.attention\.self\.(query|key|value)\.(\w+)", r"decoder.layer.\1.\2.\3"),
        (rf"{layer}\.attention\.output\.dense\.(\w+)", r"decoder.layer.\1.out.\2"),
        (rf"{layer}\.attention\.output\.LayerNorm\.(\w+)", r"decoder.layer.\1.norm1.\2"),
        (rf"{layer}\.crossattention\.self\.(query|key|value)\.(\w+)", r"decoder.layer.\1.cross_\2.\3"),
        (rf"{layer}\.crossattention\.output\.dense\.(\w+)", r"decoder.layer.\1.cross_out.\2"),
        (rf"{layer}\.crossattention\.output\.LayerNorm\.(\w+)", r"decoder.layer.\1.norm_cross.\2"),
        (rf"{layer}\.intermediate\.dense\.(\w+)", r"decoder.layer.\1.fc1.\2"),
        (rf"{layer}\.output\.dense\.(\w+)", r"decoder.layer.\1.fc2.\2"),
        (rf"{layer}\.output\.LayerNorm\.(\w+)", r"decoder.layer.\1.norm2.\2"),
    )


def head_names(predictions: str) -> tuple[Rule, ...]:
    """Returns the renaming rules of the masked-language-model head under ``predictions``.

    ``predictions`` is a pattern such as ``decoder\\.cls\\.predictions``.
    """
    return (
        (rf"{predictions}\.transform\.dense\.(\w+)", r"decoder.transform.\1"),
        (rf"{predictions}\.transform\.LayerNorm\.(\w+)", r"decoder.transform_norm.\1"),
        (rf"{predictions}\.decoder\.weight", "decoder.head.weight"),
        (rf"{predictions}\.decoder\.bias", "decoder.head.bias"),
        (rf"{predictions}\.bias", "decoder.head.shared_bias"),
    )


BERT_NAMES = Names(
    rules=layer_names(r"decoder\.bert") + head_names(r"decoder\.cls\.predictions"),
    # Buffers of older versions, and the pooler of the checkpoint that a decoder was initialised from.
    unused=(r"decoder\.bert\.embeddings\.(position|token_type)_ids", r"decoder\.bert\.pooler\..+"),
)


def read_bert(fields: Fields) -> BertConfig:
    """Reads the decoder's dimensions."""
    activation = fields.activation("hidden_act", "gelu")
    return bert_config(fields, family="bert", vocab_size=30522, offset=0, head_activation=activation)


def dimensions(
    fields: Fields, *, vocab_size: int, positions: int, layers: int = 12, heads: int = 12
) -> dict[str, Any]:
    """Reads the dimensions that decoders with BERT's fields share. The arguments are the family's defaults."""
    fields.require(
        "position_embedding_type", "absolute", "only absolute positions are supported", default="absolute"
    )
    hidden = fields.positive_int("hidden_size", 768)
    return {
        "vocab_size": fields.positive_int("vocab_size", vocab_size),
        "n_positions": fields.positive_int("max_position_embeddings", positions),
        "hidden_size": hidden,
        "num_layers": fields.layers("num_hidden_layers", layers),
        "num_heads": fields.heads("num_attention_heads", heads, hidden),
        "inner_size": fields.positive_int("intermediate_size", 3072),
        "activation": fields.activation("hidden_act", "gelu"),
        "layer_norm_eps": fields.positive_number("layer_norm_eps", 1e-12),
    }


def bert_config(fields: Fields, *, family: str, vocab_size: int, offset: int, head_activation: str) -> BertConfig:
    """Reads the dimensions of a decoder with BERT's fields.

    Args:
        vocab_size: the family's default.
        offset: rows of the position table before the first token's row.
    """
    for field in ("is_decoder", "add_cross_attention"):
        fields.require(field, True, SEES_NO_IMAGE, default=False)
    read = dimensions(fields, vocab_size=vocab_size, positions=512)
    rows = read["n_positions"]
    if rows <= offset:
        raise fields.error("max_position_embeddings", rows, f"the first {offset} positions are not for tokens")
    return BertConfig(
        **{**read, "n_positions": rows - offset},
        family=family,
        tied_head=fields.switch("tie_word_embeddings", True),
        head_activation=head_activation,
        position_offset=offset,
        token_types=fields.positive_int("type_vocab_size", 2),
    )


ROBERTA_NAMES = Names(
    rules=(
        *layer_names(r"decoder\.roberta"),
        (r"decoder\.lm_head\.dense\.(\w+)", r"decoder.transform.\1"),
        (r"decoder\.lm_head\.layer_norm\.(\w+)", r"decoder.transform_norm.\1"),
        (r"decoder\.lm_head\.decoder\.weight", "decoder.head.weight"),
        (r"decoder\.lm_head\.decoder\.bias", "decoder.head.bias"),
        (r"decoder\.lm_head\.bias", "decoder.head.shared_bias"),
    ),
    unused=(r"decoder\.roberta\.embeddings\.(position|token_type)_ids", r"decoder\.roberta\.pooler\..+"),
)


def read_roberta(fields: Fields) -> BertConfig:
    """Reads the decoder's dimensions."""
    offset = _rows_for_padding(fields)
    return bert_config(fields, family="roberta", vocab_size=50265, offset=offset, head_activation="gelu")


def _rows_for_padding(fields: Fields) -> int:
    """Returns the number of rows of a position table up to the padding token's, which is the row of its id."""
    padding = fields.values.get("pad_token_id", 1)
    if not is_whole(padding) or padding < 0:
        raise fields.error("pad_token_id", padding, "a token id is expected: positions are counted from it")
    return padding + 1


_LEARNED_OFFSET = 2  # rows of the learned table before the first token's row, as in fairseq

_PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
_LAYER_NORMS = {
    "self_attn_layer_norm": "norm1",
    "encoder_attn_layer_norm": "norm_cross",
    "final_layer_norm": "norm2",
}


def bart_names(theirs: str, ours: str) -> tuple[Rule, ...]:
    """Returns the renaming rules of positions and layers of BART's encoder or decoder.

    ``theirs`` is a pattern of its module, such as ``decoder\\.model\\.decoder``; ``ours`` is the prefix of the
    new names.
    """
    layer = rf"{theirs}\.layers\.(\d+)"
    return (
        (rf"{theirs}\.embed_positions\.weight", f"{ours}.position"),
        (rf"{theirs}\.layernorm_embedding\.(\w+)", rf"{ours}.embed_norm.\1"),
        *(
            (rf"{layer}\.self_attn\.{their}\.(\w+)", rf"{ours}.layer.\1.{our}.\2")
            for their, our in _PROJECTIONS.items()
        ),
        *(
            (rf"{layer}\.encoder_attn\.{their}\.(\w+)", rf"{ours}.layer.\1.cross_{our}.\2")
            for their, our in _PROJECTIONS.items()
        ),
        *((rf"{layer}\.{their}\.(\w+)", rf"{ours}.layer.\1.{our}.\2") for their, our in _LAYER_NORMS.items()),
        (rf"{layer}\.(fc1|fc2)\.(\w+)", rf"{ours}.layer.\1.\2.\3"),
    )


TROCR_NAMES = Names(
    rules=(
        (r"decoder\.model\.decoder\.embed_tokens\.weight", "decoder.token"),
        *bart_names(r"decoder\.model\.decoder", "decoder"),
        (r"decoder\.output_projection\.weight", "decoder.head.weight"),
    ),
    # Buffers of older versions.
    unused=(r"decoder\.model\.decoder\.(version|embed_positions\.(_float_tensor|weights))",),
)


def bart_dimensions(fields: Fields, positions: int) -> dict[str, Any]:
    """Reads the dimensions that BART's decoders share. ``positions``: the family's default."""
    hidden = fields.positive_int("d_model", 1024)
    return {
        "vocab_size": fields.positive_int("vocab_size", 50265),
        "n_positions": fields.positive_int("max_position_embeddings", positions),
        "hidden_size": hidden,
        "num_layers": fields.layers("decoder_layers", 12),
        "num_heads": fields.heads("decoder_attention_heads", 16, hidden, "d_model"),
        "inner_size": fields.positive_int("decoder_ffn_dim", 4096),
        "activation": fields.activation("activation_function", "gelu"),
        "layer_norm_eps": 1e-5,  # the default of torch.nn.LayerNorm, because there is no field for it
        "embedding_scale": hidden**0.5 if fields.switch("scale_embedding", False) else 1.0,
        "head_bias": False,
    }


def read_trocr(fields: Fields) -> BertConfig:
    """Reads the decoder's dimensions."""
    fields.require("add_cross_attention", True, SEES_NO_IMAGE, default=True)
    learned = fields.switch("use_learned_position_embeddings", True)
    return BertConfig(
        **bart_dimensions(fields, 512),
        family="trocr",
        tied_head=fields.switch("tie_word_embeddings", True),
        embedding_norm=fields.switch("layernorm_embedding", True),
        position_offset=_LEARNED_OFFSET if learned else _rows_for_padding(fields),
        learned_positions=learned,
    )
