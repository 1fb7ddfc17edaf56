"""Reads `VisionEncoderDecoderModel`: an encoder of one family and a decoder of another."""

from collections.abc import Callable, Mapping
from typing import Any

from snapcap.models.dimensions import DEFAULT_NEW_TOKENS, DecoderConfig, GenerationConfig, Parts, VisionConfig
from snapcap.models.families import beit, bert, deit, gpt2, roberta, trocr, vit
from snapcap.models.fields import ConfigError, Fields, is_whole
from snapcap.models.names import Names

_ENCODERS: dict[str, tuple[Callable[[Fields], VisionConfig], Names]] = {
    "beit": (beit.read, beit.NAMES),
    "deit": (deit.read, deit.NAMES),
    "vit": (vit.read, vit.NAMES),
}
_DECODERS: dict[str, tuple[Callable[[Fields], DecoderConfig], Names]] = {
    "bert": (bert.read, bert.NAMES),
    "gpt2": (gpt2.read, gpt2.NAMES),
    "roberta": (roberta.read, roberta.NAMES),
    "trocr": (trocr.read, trocr.NAMES),
}
_PROJECTION = Names(rules=((r"enc_to_dec_proj\.(\w+)", r"projection.\1"),))


def read(config: Fields, generation: Mapping[str, Any]) -> Parts:
    """Raises:
    ConfigError: a part, or a field of it, is not supported.
    """
    encoder, decoder = config.section("encoder"), config.section("decoder")
    read_encoder, encoder_names = _ENCODERS[_known(encoder, _ENCODERS)]
    read_decoder, decoder_names = _DECODERS[_known(decoder, _DECODERS)]
    vision = read_encoder(encoder)
    text = read_decoder(decoder)
    return Parts(
        vision,
        text,
        _generation(generation, config.values, decoder.values, text),
        encoder_names + decoder_names + _PROJECTION,
        projected=_projected(vision, text, decoder),
    )


def _known(part: Fields, families: Mapping[str, object]) -> str:
    family = part.values.get("model_type")
    if family not in tuple(families):
        raise part.error("model_type", family, f"supported are {', '.join(families)}")
    return str(family)


def _projected(vision: VisionConfig, text: DecoderConfig, decoder: Fields) -> bool:
    """transformers' rule: without ``cross_attention_hidden_size`` a projection bridges two widths; with it
    cross-attention reads the encoder's, which only TrOCR's decoder can."""
    field = "cross_attention_hidden_size"
    cross = decoder.values.get(field)
    if cross is None:
        return vision.hidden_size != text.hidden_size
    if cross != vision.hidden_size:
        raise decoder.error(field, cross, f"must equal the encoder's hidden_size {vision.hidden_size}")
    if text.family != "trocr" and cross != text.hidden_size:
        raise decoder.error(field, cross, f"must equal the decoder's width {text.hidden_size}")
    return False


def _generation(
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    decoder: Mapping[str, Any],
    text: DecoderConfig,
) -> GenerationConfig:
    """transformers' order: ``generation_config.json``, then the top of ``config.json``, then the decoder's part."""

    def look_up(*fields: str) -> Any:
        for field in fields:
            for source in (generation, config, decoder):
                if source.get(field) is not None:
                    return source[field]
        return None

    eos = look_up("eos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))
    start = look_up("decoder_start_token_id", "bos_token_id")
    for field, ids in (("decoder_start_token_id", (start,)), ("eos_token_id", eos_ids)):
        for token in ids:
            if not is_whole(token) or not 0 <= token < text.vocab_size:
                raise ConfigError(field, token, f"a token id below vocab_size {text.vocab_size} is expected")
    if text.family == "roberta" and start == decoder.get("pad_token_id", 1):
        raise ConfigError("decoder_start_token_id", start, "RoBERTa gives the padding token no position")
    pad = look_up("pad_token_id")
    lengths = Fields({field: look_up(field) for field in ("max_new_tokens", "max_length")})
    if lengths.values["max_new_tokens"] is not None:
        max_length = lengths.positive_int("max_new_tokens") + 1
    elif lengths.values["max_length"] is not None:
        max_length = lengths.positive_int("max_length")
    else:
        max_length = DEFAULT_NEW_TOKENS + 1
    return GenerationConfig(
        start_id=start,
        eos_ids=eos_ids,
        pad_id=pad if isinstance(pad, int) else (eos_ids[0] if eos_ids else start),
        max_length=min(max_length, text.n_positions),
    )
