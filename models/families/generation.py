"""Reads special tokens, lengths and settings from where transformers looks for them, by its rules."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from snapcap.models.dimensions import DecoderConfig
from snapcap.models.families.settings import given_settings, read_settings
from snapcap.models.fields import ConfigError, Fields, is_whole
from snapcap.models.text import DEFAULT_NEW_TOKENS, GenerationConfig


def read_generation(
    sources: Sequence[Mapping[str, Any]],
    decoder: DecoderConfig,
    start: Sequence[str],
    defaults: Mapping[str, Any] = MappingProxyType({}),
    new_tokens: int | None = None,
) -> GenerationConfig:
    """Reads special tokens from the first source that has them, and lengths and settings as `given_settings` does.

    Args:
        sources: ``generation_config.json``, then the objects of ``config.json`` in transformers' order.
        start: the fields that name the first token, in the order in which they are looked up.
        defaults: transformers' special tokens, used if no source has them.
        new_tokens: the default number of new tokens. Lengths are then read from ``generation_config.json`` only,
            because many a ``config.json`` holds transformers' 20, which would cut the family's captions. None
            reads lengths from all sources.

    Raises:
        ConfigError: a field has a value that is not supported.
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
    start_field = next((field for field in start if look_up(field) is not None), start[0])
    start_id = look_up(start_field)
    for field, ids in ((start_field, (start_id,)), ("eos_token_id", eos_ids)):
        for token in ids:
            if not is_whole(token) or not 0 <= token < decoder.vocab_size:
                raise ConfigError(field, token, f"a token id below vocab_size {decoder.vocab_size} is expected")
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
    """Returns the id of padding, or `other` if none is given; some files write -1 for none.

    Args:
        field: the name of the id in the error.

    Raises:
        ConfigError: the model has no token of this id.
    """
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
