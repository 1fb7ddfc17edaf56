"""Reads `VisionEncoderDecoderModel`: an encoder of one family and a decoder of another."""

from collections.abc import Callable, Mapping
from typing import Any

from snapcap.models.dimensions import DecoderConfig, Gpt2Config, Parts, VisionConfig
from snapcap.models.families.generation import DECODER_START, read_generation
from snapcap.models.families.parts import bert, vit
from snapcap.models.fields import ConfigError, Fields
from snapcap.models.names import Names

_GPT2_NAMES = Names(
    rules=(
        (r"decoder\.transformer\.(wte|wpe|ln_f|h)\.(.+)", r"decoder.\1.\2"),
        (r"decoder\.lm_head\.weight", "decoder.lm_head.weight"),
    ),
    unused=(r"decoder\.transformer\.h\.\d+\.(attn|crossattention)\.(bias|masked_bias)",),  # masks of old versions
)


def _read_gpt2(fields: Fields) -> Gpt2Config:
    """Reads a GPT-2 decoder (`GPT2LMHeadModel` with cross-attention)."""
    fields.require("model_type", "gpt2")
    fields.require("add_cross_attention", True, bert.SEES_NO_IMAGE, default=True)
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


_ENCODERS: dict[str, tuple[Callable[[Fields], VisionConfig], Names]] = {
    "beit": (vit.read_beit, vit.BEIT_NAMES),
    "deit": (vit.read_deit, vit.DEIT_NAMES),
    "vit": (vit.read_vit, vit.VIT_NAMES),
}
_DECODERS: dict[str, tuple[Callable[[Fields], DecoderConfig], Names]] = {
    "bert": (bert.read_bert, bert.BERT_NAMES),
    "gpt2": (_read_gpt2, _GPT2_NAMES),
    "roberta": (bert.read_roberta, bert.ROBERTA_NAMES),
    "trocr": (bert.read_trocr, bert.TROCR_NAMES),
}
_PROJECTION = Names(rules=((r"enc_to_dec_proj\.(\w+)", r"projection.\1"),))


def read(config: Fields, generation: Mapping[str, Any]) -> Parts:
    """Reads the dimensions of both parts, and generation settings. Raises ConfigError if a part, or a field of it,
    is not supported."""
    encoder, decoder = config.section("encoder"), config.section("decoder")
    read_encoder, encoder_names = _ENCODERS[encoder.one_of("model_type", _ENCODERS)]
    read_decoder, decoder_names = _DECODERS[decoder.one_of("model_type", _DECODERS)]
    vision = read_encoder(encoder)
    text = read_decoder(decoder)
    settings = read_generation((generation, config.values, decoder.values), text)
    if text.family == "roberta" and settings.start_id == decoder.values.get("pad_token_id", 1):
        raise ConfigError(DECODER_START, settings.start_id, "RoBERTa gives the padding token no position")
    return Parts(
        vision,
        text,
        settings,
        encoder_names + decoder_names + _PROJECTION,
        projected=_projected(vision, text, decoder),
    )


def _projected(vision: VisionConfig, text: DecoderConfig, decoder: Fields) -> bool:
    """Returns whether a projection stands between encoder and decoder, by transformers' rule.

    Without ``cross_attention_hidden_size``, a projection bridges two different widths. With it, cross-attention
    reads states of the encoder's width; only TrOCR's decoder can read a width that is not its own.
    """
    field = "cross_attention_hidden_size"
    cross = decoder.values.get(field)
    if cross is None:
        return vision.hidden_size != text.hidden_size
    if cross != vision.hidden_size:
        raise decoder.error(field, cross, f"must equal the encoder's hidden_size {vision.hidden_size}")
    if text.family != "trocr" and cross != text.hidden_size:
        raise decoder.error(field, cross, f"must equal the decoder's width {text.hidden_size}")
    return False
