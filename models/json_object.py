"""Reads JSON objects of untrusted files, so that all readers agree on their content, and keeps records as JSON."""

import json
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


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


def to_json(record: "DataclassInstance") -> str:
    """Serialises a record as a single line of JSON. Members are values of JSON, paths, tuples and such records."""
    return json.dumps(asdict(record), default=str)


def from_json(kind: type[T], text: str | bytes) -> T:
    """The reverse of ``to_json``. Raises ValueError if the text is not such a record, however it is damaged."""
    try:
        record: T = _read(kind, json.loads(text))
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"is no {kind.__name__}: {error}") from error
    return record


def _read(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        members = {field.name: _read(field.type, value[field.name]) for field in fields(kind)}
        if len(value) != len(members):
            raise TypeError("it has other members")
        return kind(**members)
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], each) for each in value)
    if kind in (int, str, bool) and type(value) is not kind:
        raise TypeError(f"{str(value)[:80]!r} is no {kind.__name__}")
    return Path(value) if value is not None and Path in (kind, *get_args(kind)) else value
