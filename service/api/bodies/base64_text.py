"""Decodes the base64 of images in JSON and in forms, in pieces, so that Python's lock is released in between.

Clients write base64 in many forms: with line breaks, in the URL-safe alphabet, percent-encoded, without padding, as
a data URI with parameters. Every API that takes base64 accepts all of these forms.
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
# A data URI may have parameters before its base64, such as the name of the file. Some clients put them after it.
_MAX_PARAMETERS = 8192
_DATA_URI = re.compile(
    rb"data:(?:.{0,%d}?;)?base64(?:;[^,]{0,1000})?," % _MAX_PARAMETERS, re.IGNORECASE | re.DOTALL
)
_WHITESPACE = b" \t\n\r\v\f"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_MOST_PADDING = 3  # some clients append three characters to any text


def is_data_uri(text: str) -> bool:
    """Tells whether the text begins like a data URI. Leading whitespace and a percent-encoded colon are allowed."""
    return re.match(r"\s{0,1000}data(:|%3A)", text, re.IGNORECASE) is not None


def decode_base64(text: str | bytes) -> bytes:
    """Returns the bytes of base64 or of a base64 data URI, or b"" if the text is neither."""
    try:
        if isinstance(text, LongText):
            return _decode(_pieces(text.literal))
        data = text if isinstance(text, bytes) else text.encode("ascii")
        return _decode(data[at : at + _PIECE] for at in range(0, len(data), _PIECE))
    except ValueError:  # the base class of binascii.Error, JSONDecodeError and UnicodeError
        return b""


def _decode(pieces: Iterable[bytes]) -> bytes:
    """Returns the bytes of base64 in pieces. Raises ValueError."""
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
    if left:  # the last 2 or 3 characters; their padding may be missing
        found.write(binascii.a2b_base64(left.translate(_URL_SAFE) + b"=" * (4 - len(left)), strict_mode=True))
    return found.getvalue()


def _without_head(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the base64 of a data URI, or the whole text if it is no data URI."""
    head = b""
    for piece in pieces:
        head += piece
        if len(head) > _MAX_PARAMETERS:
            break
    prefix = _DATA_URI.match(head)
    return chain([head[prefix.end() :] if prefix else head], pieces)


def _plain(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the pieces without whitespace, and with percent-encoded characters decoded."""
    left = b""
    for piece in pieces:
        text = left + piece if left else piece
        cut = text.find(b"%", max(len(text) - 2, 0))
        left = text[cut:] if cut >= 0 else b""  # an escape that continues in the next piece
        text = text[: len(text) - len(left)]
        if b"%" in text:
            text = unquote_to_bytes(text)
        yield text.translate(None, _WHITESPACE)
    yield left  # an incomplete escape, which fails as base64


def _pieces(literal: memoryview) -> Iterator[bytes]:
    """Yields the decoded characters between the quotes of a JSON string, in pieces. Raises ValueError."""
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
