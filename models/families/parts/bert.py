"""Reads BERT decoders of a vision-encoder-decoder, and the parts that related decoders share with BERT.

The class is `BertLMHeadModel` with cross-attention.
"""

from snapcap.models.dimensions import BertConfig
from snapcap.models.fields import Fields
from snapcap.models.names import Names, Rule


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


NAMES = Names(
    rules=layer_names(r"decoder\.bert") + head_names(r"decoder\.cls\.predictions"),
    # Buffers of older versions, and the pooler of the checkpoint that a decoder was initialised from.
    unused=(r"decoder\.bert\.embeddings\.(position|token_type)_ids", r"decoder\.bert\.pooler\..+"),
)


def read(fields: Fields) -> BertConfig:
    """Reads the decoder's dimensions.

    Raises:
        ConfigError: a field has a value that is not supported.
    """
    return bert_config(
        fields,
        family="bert",
        vocab_size=30522,
        positions=512,
        offset=0,
        head_activation=fields.activation("hidden_act", "gelu"),
    )


def bert_config(
    fields: Fields, *, family: str, vocab_size: int, positions: int, offset: int, head_activation: str
) -> BertConfig:
    """Reads the dimensions of a decoder with BERT's fields.

    Args:
        vocab_size, positions: the family's defaults.
        offset: rows of the position table before the first token's row.
    """
    for field in ("is_decoder", "add_cross_attention"):
        fields.require(field, True, "a decoder without cross-attention cannot see the image", default=False)
    fields.require(
        "position_embedding_type", "absolute", "only absolute positions are supported", default="absolute"
    )
    hidden = fields.positive_int("hidden_size", 768)
    rows = fields.positive_int("max_position_embeddings", positions)
    if rows <= offset:
        raise fields.error("max_position_embeddings", rows, f"the first {offset} positions are not for tokens")
    return BertConfig(
        family=family,
        vocab_size=fields.positive_int("vocab_size", vocab_size),
        n_positions=rows - offset,
        hidden_size=hidden,
        num_layers=fields.layers("num_hidden_layers", 12),
        num_heads=fields.heads("num_attention_heads", 12, hidden),
        inner_size=fields.positive_int("intermediate_size", 3072),
        activation=fields.activation("hidden_act", "gelu"),
        layer_norm_eps=fields.positive_number("layer_norm_eps", 1e-12),
        tied_head=fields.switch("tie_word_embeddings", True),
        head_activation=head_activation,
        position_offset=offset,
        token_types=fields.positive_int("type_vocab_size", 2),
    )
