"""Reads RoBERTa decoders of a vision-encoder-decoder (`RobertaForCausalLM` with cross-attention).

RoBERTa differs from BERT in three ways: positions begin after the padding token's, the head's activation is always
gelu, and its tensors have other names.
"""

from snapcap.models.dimensions import BertConfig
from snapcap.models.families.parts.bert import bert_config, layer_names
from snapcap.models.fields import Fields, is_whole
from snapcap.models.names import Names

NAMES = Names(
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


def read(fields: Fields) -> BertConfig:
    """Reads the decoder's dimensions.

    Raises:
        ConfigError: a field has a value that is not supported.
    """
    padding = fields.values.get("pad_token_id", 1)
    if not is_whole(padding) or padding < 0:
        raise fields.error("pad_token_id", padding, "a token id is expected: positions are counted from it")
    return bert_config(
        fields, family="roberta", vocab_size=50265, positions=512, offset=padding + 1, head_activation="gelu"
    )
