"""Parses a multipart/form-data body in memory: a bounded number of parts, as a rule in UTF-8.

The body is read in pieces, so that Python's lock is released in between: a search through 20 MiB takes up to
160 ms.
"""

import io
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError

from snapcap.models.dataclass import dataclass
from snapcap.service.errors import InvalidMultipart, UnsupportedMediaType
from snapcap.service.http.json_text import decode_base64

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_PIECE = 64 << 10
_MAX_PARTS = 64
_MAX_BOUNDARY = 70  # RFC 2046
_MAX_CONTENT_TYPE = 1024
_MAX_PARAMETERS = 16
# In a quoted value, a semicolon and a quote after a backslash are part of the value.
_PARAMETER = re.compile(rb';[ \t]*([^;=" \t]*)[ \t]*(?:=[ \t]*(?:"((?:[^"\\]|\\.)*)"[^;]*|([^;]*)))?', re.DOTALL)
_CHARSET_OF_VALUE = re.compile(rb"\A[\w-]*'[\w-]*'")  # RFC 8187, as in filename*=UTF-8''a.png
_MAX_PART_HEADERS = 16
_MAX_PART_HEADER_BYTES = 4096
# Only these charsets are decoded: some codecs of Python take time that grows with the square of the text.
_CHARSETS = frozenset({b"", b"utf-8", b"utf8", b"us-ascii", b"ascii"})
_LATIN = b"iso-8859-1"  # Apache's HttpClient for Java names it for each text
# Bytes of the longest text that is converted: an image would hold Python's lock, and take three times its memory.
_LONGEST_LATIN = 64 << 10
# Encodings of a part's data as it is. Base64 is decoded.
_AS_IT_IS = (b"", b"7bit", b"8bit", b"binary")
_CHARSET_FIELD = b"_charset_"  # RFC 7578: the charset of fields that do not name theirs


@dataclass(frozen=True)
class Part:
    """Holds one part of a form. `filename` None: a field, with the value `text`; otherwise a file with the bytes
    `data`."""

    name: str
    filename: str | None
    data: bytes

    @property
    def is_empty_input(self) -> bool:
        """Tells whether a browser sent the part for a file input in which no file was chosen."""
        return self.filename == "" and not self.data

    @property
    def text(self) -> str:
        """Returns the data as text. Raises InvalidMultipart if the data is not UTF-8."""
        return _utf8(self.data, f"The field {self.name[:64]!r}")


def boundary_of(content_type: str) -> tuple[bytes, bytes]:
    """Returns the boundary that a Content-Type names, and the charset of texts that do not name theirs. Raises
    InvalidMultipart, UnsupportedMediaType."""
    parameters = _parameters(content_type[:_MAX_CONTENT_TYPE].encode("latin-1", "replace"))
    charset = parameters.get(b"charset", b"")
    _in_utf_8(b"", charset)
    boundary = parameters.get(b"boundary", b"")
    if not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise _unreadable(f"the Content-Type has no boundary of 1 to {_MAX_BOUNDARY} characters")
    return boundary, charset


def parse_multipart(boundary: bytes, body: bytes, charset: bytes = b"") -> list[Part]:
    """Returns the parts in order. `charset`: the charset of texts that do not name theirs. Raises InvalidMultipart,
    UnsupportedMediaType."""
    start = _check_delimiters(body, b"--" + boundary)
    parts = _Parts(charset)
    limits = {"max_header_count": _MAX_PART_HEADERS, "max_header_size": _MAX_PART_HEADER_BYTES}
    try:
        parser = MultipartParser(boundary, parts.callbacks(), **limits)
        for at in range(start, len(body), _PIECE):
            parser.write(body[at : at + _PIECE])
    except FormParserError as error:
        raise _unreadable(str(error)[:200] or "it is not well-formed") from None
    if not parts.ended:
        raise _unreadable("it ends before its closing boundary")
    return parts.found


def _check_delimiters(body: bytes, delimiter: bytes) -> int:
    """Returns the place of the first delimiter, which may have lines of text before it.

    Limits the number of delimiters before parsing: the parser is slow, as it reads byte by byte after each of them.

    Raises InvalidMultipart."""
    start = at = _find(body, delimiter, 0)
    if at < 0:
        raise _unreadable("the boundary that the Content-Type names is not in it")
    for _ in range(_MAX_PARTS + 1):
        if at < 0:
            return start if body[start - 1 : start] == b"\n" else 0
        at += len(delimiter)
        if body[at : at + 1] in (b" ", b"\t"):
            raise _unreadable("a boundary is followed by a space")
        if body[at : at + 1] == b"\n":
            raise _unreadable("a line ends with LF alone, and with CR LF in a form")
        at = _find(body, delimiter, at)
    if at >= 0:
        raise _unreadable(f"there are more than {_MAX_PARTS} parts, or the boundary is within a part")
    return 0


def _find(body: bytes, delimiter: bytes, start: int) -> int:
    """Returns the place of the first delimiter from `start` on, or -1, as `bytes.find` does."""
    for at in range(start, len(body), _PIECE):
        found = body.find(delimiter, at, at + _PIECE + len(delimiter) - 1)
        if found >= 0:
            return found
    return -1


class _Parts:
    """Collects the parts of a form from the events of the parser."""

    def __init__(self, charset: bytes) -> None:
        self.found: list[Part] = []
        self.ended = False
        self._charset = charset
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""
        self._data = io.BytesIO()

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._part_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._headers, self._data = {}, io.BytesIO()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._data.write(memoryview(data)[start:end])

    def _end_part(self) -> None:
        options = _parameters(self._headers.get(b"content-disposition", b""))
        if b"name" not in options:
            raise _unreadable('a part has no Content-Disposition with a "name"')
        filename, data = _filename(options), self._decoded()
        if filename is None:
            parameters = _parameters(self._headers.get(b"content-type", b""))
            data = _in_utf_8(data, parameters.get(b"charset", self._charset))
            if options[b"name"] == _CHARSET_FIELD:
                _in_utf_8(b"", data)
                self._charset = data
                return
        # The name of a file is only repeated in the reply, so a name that is not UTF-8, as of old clients, is
        # accepted.
        shown = None if filename is None else filename.decode("utf-8", "replace")
        self.found.append(Part(_utf8(options[b"name"], "The name of a part"), shown, data))

    def _decoded(self) -> bytes:
        """Returns the data of the part, decoded if the client used a mail encoding (Content-Transfer-Encoding)."""
        encoding = self._headers.get(b"content-transfer-encoding", b"").strip().lower()
        data = self._data.getvalue()
        if encoding in _AS_IT_IS:
            return data
        found = decode_base64(data) if encoding == b"base64" else b""
        if data and not found:
            shown = encoding[:40].decode("latin-1")
            raise _unreadable(f"a part cannot be decoded from its Content-Transfer-Encoding, {shown!r}")
        return found

    def _end(self) -> None:
        self.ended = True


def _parameters(field: bytes) -> dict[bytes, bytes]:
    """Returns the parameters of a header, by their names in lower case. Raises InvalidMultipart."""
    found: dict[bytes, bytes] = {}
    for number, parameter in enumerate(_PARAMETER.finditer(field)):
        if number == _MAX_PARAMETERS:
            raise _unreadable(f"a field of its heads has more than {_MAX_PARAMETERS} parameters")
        name, quoted, plain = parameter.groups()
        value = plain if quoted is None else quoted.replace(b"\\\\", b"\\").replace(b'\\"', b'"')
        found[name.lower()] = (value or b"").strip(b" \t") if quoted is None else value
    return found


def _filename(parameters: dict[bytes, bytes]) -> bytes | None:
    """Returns the name of a file, or None if the part is a field. Old clients send a name that is not ASCII as
    `filename*`, or in pieces as `filename*0*`."""
    plain = parameters.get(b"filename")
    if plain is not None:
        # Internet Explorer sends the whole path.
        return plain.rpartition(b"\\")[2] if plain[1:3] == b":\\" or plain[:2] == b"\\\\" else plain
    pieces = [value for name, value in parameters.items() if name.startswith(b"filename*")]
    return unquote_to_bytes(_CHARSET_OF_VALUE.sub(b"", b"".join(pieces), 1)) if pieces else None


def _in_utf_8(data: bytes, charset: bytes) -> bytes:
    """Returns the data of a text in UTF-8. Raises UnsupportedMediaType for other charsets, and for a long text in
    ISO-8859-1."""
    name = charset.strip().lower()
    if name == _LATIN:
        if data.isascii():
            return data
        if len(data) <= _LONGEST_LATIN:
            return data.decode("latin-1").encode()
    if name not in _CHARSETS:
        shown = charset[:40].decode("latin-1")
        raise UnsupportedMediaType(f"The charset {shown!r} is not read; send the form in UTF-8.")
    return data


def _utf8(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidMultipart(f"{what} is not UTF-8; send the form in UTF-8.") from None


def _unreadable(why: str) -> InvalidMultipart:
    return InvalidMultipart(
        f"The multipart body cannot be read: {why.rstrip('.')}. Send it as `curl -F image=@photo.jpg` does."
    )
