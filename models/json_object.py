"""Reads JSON objects of untrusted files, so that all readers agree on their content. Imports no torch."""

import json
from typing import Any


def load_object(text: bytes | str) -> dict[str, Any]:
    """Returns a JSON object from UTF-8 text.

    A name that occurs twice is refused, because one reader would take the first value and another the last.

    Raises:
        ValueError: the text is not such an object. The message goes behind a name for it, as in "the header is not
            JSON".
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        value = json.loads(decoded, object_pairs_hook=_unambiguous, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name occurs twice")
    return value


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
