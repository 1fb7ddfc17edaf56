"""Decodes the base64 of images in JSON and in forms, a piece at a time, letting go of Python's lock in between.

Clients write base64 in many ways: with line breaks, in the alphabet for URLs, percent-encoded, without padding, as
a data URI with parameters. All of them are read, wherever an API takes base64.
"""

import binascii
import io
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from urllib.parse import unquote_to_bytes

from snapcap.service.api.bodies.json_text import LongText, whole_escapes

_PIECE = 256 << 10
# A data URI may have parameters before its base64, such as the name of the file.
_MAX_PARAMETERS = 8192
_DATA_URI = re.compile(rb"data:.{0,%d}?;base64," % _MAX_PARAMETERS, re.IGNORECASE | re.DOTALL)
_WHITESPACE = b" \t\n\r\v\f"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_MOST_PADDING = 3  # some clients append as much as any text may need


def is_data_uri(text: str) -> bool:
    """Tells whether the text begins as a data URI does, whitespace before it and percent-encoding aside."""
    return re.match(r"\s{0,1000}data(:|%3A)", text, re.IGNORECASE) is not None


def decode_base64(text: str | bytes) -> bytes:
    """The bytes of base64, or of a base64 data URI; empty where it is neither."""
    try:
        if isinstance(text, LongText):
            return _decode(_pieces(text.literal))
        return _decode([text if isinstance(text, bytes) else text.encode("ascii")])
    except ValueError:  # binascii.Error and those of JSON and of Unicode are such
        return b""


def _decode(pieces: Iterable[bytes]) -> bytes:
    """Raises ValueError."""
    found, left, padding = io.BytesIO(), b"", 0
    for piece in _without_head(_plain(pieces)):
        characters, equals, more = piece.partition(b"=")
        if more.strip(b"=") or (padding and characters):
            raise ValueError("padding within")
        padding += len(equals) + len(more)
        text = left + characters
        whole = len(text) - len(text) % 4
        left = text[whole:]
        found.write(binascii.a2b_base64(text[:whole].translate(_URL_SAFE), strict_mode=True))
    if padding > _MOST_PADDING:
        raise ValueError("more padding than anybody means")
    if left:  # as many as they are, whether the padding is there or not
        found.write(binascii.a2b_base64(left.translate(_URL_SAFE) + b"=" * (4 - len(left)), strict_mode=True))
    return found.getvalue()


def _without_head(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The base64 of a data URI, or all of what is none."""
    head = b""
    for piece in pieces:
        head += piece
        if len(head) > _MAX_PARAMETERS:
            break
    prefix = _DATA_URI.match(head)
    return chain([head[prefix.end() :] if prefix else head], pieces)


def _plain(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces without whitespace and percent-encoding."""
    left = b""
    for piece in pieces:
        text = left + piece if left else piece
        cut = text.find(b"%", max(len(text) - 2, 0))
        left = text[cut:] if cut >= 0 else b""  # the beginning of an escape
        text = text[: len(text) - len(left)]
        if b"%" in text:
            text = unquote_to_bytes(text)
        yield text.translate(None, _WHITESPACE)
    yield left  # which is no base64


def _pieces(literal: memoryview) -> Iterator[bytes]:
    """Decodes the characters between the quotes of a JSON string. Raises ValueError."""
    at = 0
    while at < len(literal):
        piece = bytes(literal[at : at + _PIECE])
        if b"\\" in piece:
            if at + len(piece) < len(literal):
                piece = piece[: whole_escapes(piece)]
            yield json.loads(b'"%b"' % piece).encode("ascii")
        else:
            yield piece
        at += len(piece)
