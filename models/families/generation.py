"""Reads special tokens, lengths and generation settings from where transformers looks for them, by its rules.

The fields are those of transformers' `GenerationConfig`. A field that changes no caption is ignored, and a field
that would change captions and is not supported is listed.
"""

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from types import MappingProxyType
from typing import Any

from snapcap.models.dimensions import MAX_BEAMS, MAX_PHRASE_TOKENS, MAX_PHRASES, DecoderConfig
from snapcap.models.fields import ConfigError, Fields, is_whole
from snapcap.models.text import DEFAULT_NEW_TOKENS, EarlyStopping, GenerationConfig, TokenBias

DECODER_START, BEGIN = "decoder_start_token_id", "bos_token_id"


def read_generation(
    sources: Sequence[Mapping[str, Any]],
    decoder: DecoderConfig,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    new_tokens: int | None = None,
) -> GenerationConfig:
    """Reads special tokens from the first source that has them, and lengths and settings as `given_settings` does.

    Captions of a decoder with cross-attention start with ``decoder_start_token_id`` if a source has it. All others
    start with ``bos_token_id``.

    Args:
        sources: ``generation_config.json``, then the objects of ``config.json`` in transformers' order.
        defaults: transformers' special tokens, used if no source has them.
        new_tokens: the default number of new tokens. Lengths are then read from ``generation_config.json`` only,
            because many a ``config.json`` holds transformers' 20, which would cut the family's captions. None
            reads lengths from all sources.
    """
    given = given_settings(sources)

    def look_up(*fields: str) -> Any:
        for field in fields:
            for source in (*sources, defaults):
                if source.get(field) is not None:
                    return source[field]
        return None

    eos = look_up("eos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))
    start = (BEGIN,) if decoder.prefix == "decoder" else (DECODER_START, BEGIN)
    start_field = next((field for field in start if look_up(field) is not None), start[0])
    start_id = look_up(start_field)
    for field, ids in ((start_field, (start_id,)), ("eos_token_id", eos_ids)):
        for token in ids:
            Fields({field: token}).token(field, decoder.vocab_size)
    pad = look_up("pad_token_id")
    length, counts_prompt = _max_length(given if new_tokens is None else sources[0], new_tokens)
    return GenerationConfig(
        start_id=start_id,
        eos_ids=eos_ids,
        pad_id=padding(pad, (eos_ids or (start_id,))[0], decoder.vocab_size),
        max_length=min(length, decoder.n_positions),
        counts_prompt=counts_prompt,
        **read_settings(given, eos_ids, decoder.vocab_size),
    )


def padding(given: object, other: int, vocab_size: int, field: str = "pad_token_id") -> int:
    """Returns the id of padding, or `other` if none is given; some files write -1 for none. Raises
    ConfigError, which names the ``field``, if the model has no token of this id."""
    if is_whole(given) and given >= vocab_size:
        raise ConfigError(field, given, f"a token id below vocab_size {vocab_size} is expected")
    return given if is_whole(given) and given >= 0 else other


def _max_length(given: Mapping[str, Any], new_tokens: int | None) -> tuple[int, bool]:
    """Returns the greatest number of tokens, the first one included, and whether a prompt's tokens count too."""
    lengths = Fields(given)
    if given.get("max_new_tokens") is not None:
        return lengths.positive_int("max_new_tokens") + 1, False
    if given.get("max_length") is not None:
        return lengths.positive_int("max_length"), True
    return (new_tokens or DEFAULT_NEW_TOKENS) + 1, False


_MOST_SHOWN = 60  # greatest number of a value's characters in a warning
# The values with which a field does nothing. Fields of sampling have an effect only if `do_sample` is true.
Neutral = Mapping[str, tuple[Any, ...]]
_DONE: Neutral = {
    "num_beams": (1,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "no_repeat_ngram_size": (0,),
    "repetition_penalty": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
    "sequence_bias": ([], {}),
    "exponential_decay_length_penalty": (),
    "renormalize_logits": (False,),
}
_NOT_DONE: Neutral = {
    "do_sample": (False,),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "force_words_ids": ([],),
    "guidance_scale": (1,),
    "max_time": (),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "stop_strings": ([], ""),
    "token_healing": (False,),
    "watermarking_config": ({},),
}
_SAMPLING: Neutral = {
    "temperature": (1,),
    "top_k": (0,),
    "top_p": (1,),
    "min_p": (0,),
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}
# transformers' own default, which BLIP uses whatever its files say.
_LENGTHS: Neutral = {"max_length": (20,), "max_new_tokens": (20,)}


def given_settings(sources: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the fields that transformers generates with.

    Only the first source, ``generation_config.json``, is used if it has fields. Otherwise the other sources are
    merged, and the first source that has a field wins.
    """
    first, *others = sources
    merged: dict[str, Any] = {}
    for source in [first] if first else others:
        merged = {name: value for name, value in source.items() if value is not None} | merged
    return merged


def read_settings(given: Mapping[str, Any], eos_ids: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """Returns the fields of `text.GenerationConfig` beside special tokens and lengths."""
    fields = Fields(given)
    early: EarlyStopping = given.get("early_stopping", False)
    if not (isinstance(early, bool) or early == "never"):
        raise fields.error("early_stopping", early, 'true, false or "never" is expected')
    beams = fields.whole("num_beams", 1, least=1)
    forced_eos = given.get("forced_eos_token_id")
    ends = forced_eos if isinstance(forced_eos, list) else [] if forced_eos is None else [forced_eos]
    biases, too_many = _biases(fields, eos_ids, vocab_size)
    not_done = [*too_many]
    not_done += ["num_beams"] if beams > MAX_BEAMS else []
    not_done += ["forced_eos_token_id"] if len(ends) > 1 else []
    return {
        "forced_bos_id": _token(fields, "forced_bos_token_id", given.get("forced_bos_token_id"), vocab_size),
        "forced_eos_id": _token(fields, "forced_eos_token_id", ends[0] if len(ends) == 1 else None, vocab_size),
        "num_beams": min(beams, MAX_BEAMS),
        "length_penalty": fields.number("length_penalty", 1.0),
        "early_stopping": early,
        "no_repeat_ngram_size": fields.whole("no_repeat_ngram_size", 0),
        "repetition_penalty": fields.positive_number("repetition_penalty", 1.0),
        "min_length": fields.whole("min_length", 0),
        "min_new_tokens": None if given.get("min_new_tokens") is None else fields.whole("min_new_tokens"),
        "suppressed": _tokens(fields, "suppress_tokens", vocab_size),
        "suppressed_first": _tokens(fields, "begin_suppress_tokens", vocab_size),
        "biases": biases,
        "end_growth": _end_growth(fields),
        "renormalises": fields.switch("renormalize_logits", False),
        "not_done": _with_effect(given, _NOT_DONE, not_done),
    }


def all_named(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns every field that would change a caption, for a family that generates without these fields."""
    return _with_effect(given, {**_DONE, **_NOT_DONE, **_LENGTHS})


def _with_effect(given: Mapping[str, Any], neutral: Neutral, further: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the fields in ``neutral`` that ``given`` sets to a value with an effect, and ``further`` fields, as
    ``field = value``. If the model samples, fields of sampling are included."""

    def changing(neutral: Neutral) -> list[str]:
        return [name for name in neutral if given.get(name) is not None and given[name] not in neutral[name]]

    sampling = changing(_SAMPLING) if given.get("do_sample") else []
    return tuple(_shown(name, given[name]) for name in (*changing(neutral), *further, *sampling))


def _shown(name: str, value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return f"{name} = {text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + '…'}"


def _token(fields: Fields, name: str, value: Any, vocab_size: int) -> int | None:
    return None if value is None else Fields({name: value}, fields.prefix).token(name, vocab_size)


def _tokens(fields: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    """Returns a list of tokens without ids that the model lacks; some files write -1 for none."""
    value = fields.values.get(name, [])
    if not isinstance(value, list) or not all(is_whole(token) for token in value):
        raise fields.error(name, value, "a list of token ids is expected")
    return tuple(token for token in value if 0 <= token < vocab_size)


def _biases(
    fields: Fields, eos_ids: Sequence[int], vocab_size: int
) -> tuple[tuple[TokenBias, ...], tuple[str, ...]]:
    """Returns the biases of ``sequence_bias`` and ``bad_words_ids``, and which of these fields are too long.

    A field is too long if, with the field before it, there are over ``MAX_PHRASES`` sequences of several tokens, or
    one longer than ``MAX_PHRASE_TOKENS``. Only its single tokens are then biased. An end token alone is never
    banned, as in transformers.
    """
    biased = {_known(fields, "sequence_bias", ids, vocab_size): bias for ids, bias in _sequence_biases(fields)}
    words = fields.values.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(ids, list) for ids in words):
        raise fields.error("bad_words_ids", words, "a list of lists of token ids is expected")
    banned = {_known(fields, "bad_words_ids", ids, vocab_size) for ids in words} - {(end,) for end in eos_ids}
    added: dict[tuple[int, ...], float] = {}
    too_many: list[str] = []
    for name, biases in (("sequence_bias", biased), ("bad_words_ids", dict.fromkeys(banned, float("-inf")))):
        long = {ids for ids in (*added, *biases) if len(ids) > 1}
        fits = len(long) <= MAX_PHRASES and all(len(ids) <= MAX_PHRASE_TOKENS for ids in long)
        too_many += [] if fits else [name]
        added |= {ids: bias for ids, bias in biases.items() if fits or len(ids) == 1}
    return tuple(TokenBias(ids, bias) for ids, bias in added.items()), tuple(too_many)


def _sequence_biases(fields: Fields) -> list[tuple[list[Any], float]]:
    value = fields.values.get("sequence_bias") or []
    why = "a list of [token ids, number] is expected"
    if not isinstance(value, list):
        raise fields.error("sequence_bias", value, why)
    pairs = []
    for each in value:
        if not (isinstance(each, list) and len(each) == 2 and isinstance(each[0], list)):
            raise fields.error("sequence_bias", each, why)
        ids, bias = each
        if not (is_whole(bias) or isinstance(bias, float)) or not (isfinite(bias) or bias == float("-inf")):
            raise fields.error("sequence_bias", each, why)
        pairs.append((ids, float(bias)))
    return pairs


def _known(fields: Fields, name: str, ids: list[Any], vocab_size: int) -> tuple[int, ...]:
    if not ids or not all(is_whole(token) and 0 <= token < vocab_size for token in ids):
        raise fields.error(name, ids, f"token ids below vocab_size {vocab_size} are expected")
    return tuple(ids)


def _end_growth(fields: Fields) -> tuple[int, float] | None:
    name = "exponential_decay_length_penalty"
    value = fields.values.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise fields.error(name, value, "[tokens, factor] is expected")
    pair = Fields({"tokens": value[0], "factor": value[1]}, f"{fields.prefix}{name}: ")
    return pair.whole("tokens"), pair.positive_number("factor")
