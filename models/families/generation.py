"""Reads special tokens and lengths from where transformers looks for them, for every family that uses its rules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from snapcap.models.dimensions import DecoderConfig
from snapcap.models.fields import ConfigError, Fields, is_whole
from snapcap.models.text import DEFAULT_NEW_TOKENS, GenerationConfig


def read_generation(
    sources: Sequence[Mapping[str, Any]], decoder: DecoderConfig, start: Sequence[str]
) -> GenerationConfig:
    """The first source that has a field goes.

    Args:
        start: the fields that name the first token, in their order.

    Raises:
        ConfigError: a field has a value that is not supported.
    """

    def look_up(*fields: str) -> Any:
        for field in fields:
            for source in sources:
                if source.get(field) is not None:
                    return source[field]
        return None

    eos = look_up("eos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))
    start_id = look_up(*start)
    for field, ids in ((start[0], (start_id,)), ("eos_token_id", eos_ids)):
        for token in ids:
            if not is_whole(token) or not 0 <= token < decoder.vocab_size:
                raise ConfigError(field, token, f"a token id below vocab_size {decoder.vocab_size} is expected")
    pad = look_up("pad_token_id")
    return GenerationConfig(
        start_id=start_id,
        eos_ids=eos_ids,
        pad_id=padding(pad, (eos_ids or (start_id,))[0], decoder.vocab_size),
        max_length=min(_max_length(look_up), decoder.n_positions),
    )


def padding(given: object, other: int, vocab_size: int) -> int:
    """The id of padding; `other` where there is none, which some files write as -1."""
    return given if is_whole(given) and 0 <= given < vocab_size else other


def _max_length(look_up: Callable[..., Any]) -> int:
    """Tokens with the first one."""
    lengths = Fields({field: look_up(field) for field in ("max_new_tokens", "max_length")})
    if lengths.values["max_new_tokens"] is not None:
        return lengths.positive_int("max_new_tokens") + 1
    if lengths.values["max_length"] is not None:
        return lengths.positive_int("max_length")
    return DEFAULT_NEW_TOKENS + 1
