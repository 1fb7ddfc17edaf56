"""Decodes the base64 of images in JSON a piece at a time, letting go of Python's lock in between."""

import base64
import binascii
import io
import json
import re
from collections.abc import Iterator

from snapcap.service.api.bodies.json_text import LongText, whole_escapes

_DATA_URI = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)  # a scheme has no case
_PIECE = 256 << 10
_MAX_PREFIX = 2048


def decode_base64(text: str) -> bytes:
    """The bytes of base64, or of a base64 data URI; empty where it is neither. Whitespace is allowed: `base64`
    breaks its lines."""
    prefix = _DATA_URI.match(text)
    if isinstance(text, LongText):
        return _decode_long(text.literal, prefix is not None)
    if prefix:
        text = text[prefix.end() :]
    # Few clients send whitespace, so it is only looked for then.
    return _decode(text) or _decode("".join(text.split()))


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _decode_long(literal: memoryview, has_prefix: bool) -> bytes:
    start = bytes(literal[:_MAX_PREFIX]).find(b",") + 1 if has_prefix else 0
    found, left = io.BytesIO(), b""
    try:
        for piece in _pieces(literal[start:]):
            text = left + piece
            whole = len(text) - len(text) % 4
            left = text[whole:]
            if not whole:
                continue
            data = binascii.a2b_base64(text[:whole], strict_mode=True)
            # Padding is at the end of all, or this is not the end.
            if found.tell() % 3:
                return b""
            found.write(data)
    except ValueError:  # binascii.Error and those of JSON and of Unicode are such
        return b""
    return b"" if left else found.getvalue()


def _pieces(literal: memoryview) -> Iterator[bytes]:
    """What the characters between the quotes of a JSON string stand for, without whitespace. Raises ValueError."""
    at = 0
    while at < len(literal):
        piece = bytes(literal[at : at + _PIECE])
        if b"\\" in piece:
            if at + len(piece) < len(literal):
                piece = piece[: whole_escapes(piece)]
            text = json.loads(b'"%b"' % piece)
            yield "".join(text.split()).encode("ascii")
        else:
            yield piece.replace(b" ", b"")
        at += len(piece)
