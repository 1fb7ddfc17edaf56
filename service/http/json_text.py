"""Parses JSON in bounded time, and decodes the base64 of images in JSON and in forms.

The JSON parser of the standard library holds Python's lock from the first to the last byte, so no other thread runs
meanwhile. Its time depends on the bytes in strings and the bytes outside of strings. Both are counted before
parsing. Long strings, such as images, are not parsed.

Clients write base64 in many forms: with line breaks, in the URL-safe alphabet, percent-encoded, without padding, as
a data URI with parameters. Every API that takes base64 accepts all of these forms. Base64 is decoded in pieces, so
that Python's lock is released in between.
"""

import binascii
import io
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NoReturn
from urllib.parse import unquote_to_bytes

from snapcap.models.processing.image_formats import kind_of
from snapcap.service.errors import InvalidJson, PayloadTooLarge
from snapcap.service.limits import JSON_STRING_BYTES, JSON_STRUCTURE_BYTES

# Only the string of an image may be longer. A prompt of 10,000 characters fits, even if each character is escaped.
LONG = 64 << 10
_KEPT = 10_001  # characters: above the limit of any text, so that the limit still refuses a cut text
_QUOTE, _BACKSLASH = b'"', b"\\"
_ESCAPE = 6  # bytes of the longest escape, such as \u002b
_PIECE = 256 << 10
# A data URI may have parameters before its base64, such as the name of the file. Some clients put them after it.
_MAX_PARAMETERS = 8192
_DATA_URI = re.compile(
    rb"data:(?:.{0,%d}?;)?base64(?:;[^,]{0,1000})?," % _MAX_PARAMETERS, re.IGNORECASE | re.DOTALL
)
_NO_BASE64 = re.compile(
    rf"\s{{0,1000}}data:(?!.{{0,{_MAX_PARAMETERS}}}base64\s*[;,])[^,]{{0,1000}},", re.IGNORECASE | re.DOTALL
)
_WHITESPACE = b" \t\n\r\v\f"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_NO_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_MOST_WRONG = 1000  # in a piece
_MOST_PADDING = 3  # some clients append three characters to any text


class LongText(str):
    """Holds a long string of a document. The `str` itself has only the first 10,001 characters. `literal`: the
    whole text between the quotes, escapes included."""

    literal: memoryview

    @classmethod
    def of(cls, literal: memoryview) -> "LongText":
        """Returns the long string with this literal. Raises ValueError if its beginning is no JSON string."""
        start = bytes(literal[:LONG])
        text = cls(json.loads(f'"{start[: whole_escapes(start)].decode("utf-8", "ignore")}"')[:_KEPT])
        text.literal = literal
        return text


def parse_json(body: bytes) -> Any:
    """Returns the document. Its strings of more than 64 KiB are `LongText`. Raises InvalidJson, PayloadTooLarge."""
    try:
        if len(body) <= LONG:
            return _loads(body)
        rest, texts = _splice(body)
        document = _loads(rest)
        return _with_texts(document, texts) if texts else document
    except json.JSONDecodeError as error:
        if b"\0" in body[:4] or body.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise InvalidJson("The body is not UTF-8, but perhaps UTF-16; send JSON in UTF-8.") from None
        message = error.msg.removesuffix(" at")
        raise InvalidJson(f"The body is not JSON: {message} at character {error.pos}.") from None
    except (ValueError, RecursionError):  # not UTF-8, NaN, a number of thousands of digits, too deep
        kind = kind_of(body)
        if kind is not None and kind.picture:
            raise InvalidJson(
                f"The body is not JSON, but an image ({kind.name}); send it with the Content-Type of an image."
            ) from None
        raise InvalidJson("The body is not JSON; send an object in UTF-8 with plain numbers.") from None


def whole_escapes(literal: bytes) -> int:
    """Returns the length of a part of a JSON string without an incomplete escape at its end."""
    size = len(literal)
    at = literal.rfind(_BACKSLASH, max(size - _ESCAPE, 0))
    if at < 0 or not _escaped(literal, 0, at + 1):
        return size
    escape = _ESCAPE if literal[at + 1 : at + 2] == b"u" else 2
    return size if at + escape <= size else at


def _splice(body: bytes) -> tuple[bytes, dict[str, LongText]]:
    """Replaces the long strings of a document by random names. Returns the document, and the strings by these
    names. Raises ValueError, PayloadTooLarge."""
    name = secrets.token_hex(16)  # a random name, so that no client can send it
    view = memoryview(body)
    pieces: list[bytes] = []
    texts: dict[str, LongText] = {}
    kept = at = short = structure = 0
    for start, end, quotes in _strings(body):
        structure += start - at + quotes
        if end - start > LONG:
            pieces += [body[kept:start], f"{name}{len(texts)}".encode()]
            texts[f"{name}{len(texts)}"] = LongText.of(view[start:end])
            kept = end
        else:
            short += end - start
        at = end
        if structure > JSON_STRUCTURE_BYTES or short > JSON_STRING_BYTES:
            break
    structure += len(body) - at
    if structure > JSON_STRUCTURE_BYTES or short > JSON_STRING_BYTES:
        raise PayloadTooLarge(
            f"The JSON is too large without its images; send at most {JSON_STRUCTURE_BYTES} bytes outside of "
            f"strings, and {JSON_STRING_BYTES} bytes in strings of up to {LONG} bytes."
        )
    return b"".join([*pieces, body[kept:]]), texts


def _strings(body: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields the begin and the end of each string, quotes excluded, and its number of quotes, escaped ones
    included."""
    at = quotes = 0
    while (start := body.find(_QUOTE, at) + 1) > 0:
        at, quotes = start, 1
        while (end := body.find(_QUOTE, at)) >= 0 and _escaped(body, at, end):
            at, quotes = end + 1, quotes + 1
            if quotes > JSON_STRUCTURE_BYTES:
                break
        if end < 0:
            raise ValueError("unterminated string")
        yield start, end, quotes
        at = end + 1


def _escaped(body: bytes, start: int, end: int) -> bool:
    """Tells whether an odd number of backslashes precedes `end`; none before `start` counts. Raises ValueError."""
    if body[end - 1 : end] != _BACKSLASH:
        return False
    before = body[max(start, end - LONG) : end]
    other = len(before.rstrip(_BACKSLASH))
    if other == 0 and end - start > LONG:
        raise ValueError("more backslashes than anybody means")
    return (len(before) - other) % 2 == 1


def _with_texts(document: Any, texts: dict[str, LongText]) -> Any:
    """Returns the document with the long strings in place of their names."""
    whole = [document]
    nodes: list[Any] = [whole]
    while nodes:
        node = nodes.pop()
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(value, str):
                node[key] = texts.get(value, value)
            elif isinstance(value, dict | list):
                nodes.append(value)
    return whole[0]


def _loads(text: bytes) -> Any:
    """Parses JSON in UTF-8 without NaN and Infinity. Raises ValueError, RecursionError."""
    return json.loads(text.decode("utf-8-sig"), parse_constant=_no_constant)


def _no_constant(_name: str) -> NoReturn:
    raise ValueError


def is_data_uri(text: str) -> bool:
    """Tells whether the text begins like a data URI. Leading whitespace and a percent-encoded colon are allowed."""
    return re.match(r"\s{0,1000}data(:|%3A)", text, re.IGNORECASE) is not None


def is_url(text: str) -> bool:
    """Tells whether the text begins like an http(s) URL. Leading whitespace is allowed."""
    return text.lstrip()[:8].lower().startswith(("http://", "https://"))


def decode_base64(text: str | bytes) -> bytes:
    """Returns the bytes of base64 or of a data URI, or b"" if the text is neither."""
    try:
        if isinstance(text, LongText):
            pieces = _pieces_of(text.literal)
        else:
            data = text if isinstance(text, bytes) else text.encode("ascii")
            pieces = (data[at : at + _PIECE] for at in range(0, len(data), _PIECE))
        if isinstance(text, str) and (head := _NO_BASE64.match(text)):  # bytes are percent-encoded, or letters
            return b"".join(_plain(pieces, b""))[len(unquote_to_bytes(head[0])) :]
        return _decode_pieces(pieces)
    except ValueError:  # the base class of binascii.Error, JSONDecodeError and UnicodeError
        return b""


def _decode_pieces(pieces: Iterable[bytes]) -> bytes:
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


def _plain(pieces: Iterable[bytes], dropped: bytes = _WHITESPACE) -> Iterator[bytes]:
    """Yields the pieces without the dropped characters, and with percent-encoded characters decoded."""
    left = b""
    for piece in pieces:
        text = left + piece if left else piece
        cut = text.find(b"%", max(len(text) - 2, 0))
        left = text[cut:] if cut >= 0 else b""  # an escape that continues in the next piece
        text = text[: len(text) - len(left)]
        if b"%" in text:
            text = _unquoted(text)
        yield text.translate(None, dropped)
    yield left  # an incomplete escape, which fails as base64


def _unquoted(text: bytes) -> bytes:
    """Decodes percent-encoded characters as `unquote_to_bytes` does, which takes a second for 20 MiB of them. The
    decoder of quoted-printable text, whose escapes begin with an equals sign, takes a ninth of this time. Raises
    ValueError for many percent signs that are no escape."""
    text, wrong = _NO_ESCAPE.subn(b"%25", text, _MOST_WRONG + 1)
    if wrong > _MOST_WRONG:
        raise ValueError("more percent signs than anybody means")
    return binascii.a2b_qp(text.replace(b"=", b"=3D").replace(b"%", b"="))


def _pieces_of(literal: memoryview) -> Iterator[bytes]:
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
