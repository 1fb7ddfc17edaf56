"""Decompresses request bodies with a Content-Encoding, within the size limit of a body and a limit of CPU time.

A few compressed bytes may expand to very many. The body is therefore decompressed in small pieces, and its size is
checked before each piece is kept. A body that takes more than a second of CPU time is refused.
"""

import io
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from snapcap.service.errors import InvalidEncoding, PayloadTooLarge, UnsupportedEncoding
from snapcap.service.limits import DECOMPRESSION_CPU_S

_GZIP, _DEFLATE = "gzip", "deflate"
_NAMES = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _DEFLATE}
_MOST_CODINGS = 2  # codings of one body, applied one after the other
_MOST_MEMBERS = 1000  # members of a gzip file; starting each takes time
_PIECE = 64 << 10
# zlib's `wbits` values, which name the header around the compressed bytes.
_GZIP_HEAD, _ZLIB_HEAD, _NO_HEAD = 31, 15, -15


def codings_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, ...]:
    """Returns the codings of a body in the order in which they were applied, without `identity`.

    Raises UnsupportedEncoding."""
    named = [value for name, value in headers if name == b"content-encoding"]
    if not named:
        return ()
    given = [each.strip().lower() for each in b",".join(named).decode("latin-1").split(",")]
    codings = [each for each in given if each not in ("", "identity")]
    for coding in codings:
        if coding not in _NAMES:
            raise UnsupportedEncoding(f"The content coding {coding[:40]!r} is not read")
    if len(codings) > _MOST_CODINGS:
        raise UnsupportedEncoding(f"More than {_MOST_CODINGS} content codings are not read")
    return tuple(_NAMES[each] for each in codings)


def decompress(body: bytes, codings: Iterable[str], limit: int, take: Callable[[int], object]) -> bytes:
    """Returns the decompressed body. `limit`: its maximum size in bytes. `take`: called with the size of each piece
    before the piece is kept; may raise to stop.

    Raises InvalidEncoding, PayloadTooLarge and the errors of `take`."""
    deadline = time.thread_time() + DECOMPRESSION_CPU_S
    pieces: Iterator[bytes] = (body[at : at + _PIECE] for at in range(0, len(body), _PIECE))
    for coding in reversed([*codings]):
        pieces = _inflate(pieces, coding, deadline)
    found = io.BytesIO()
    try:
        for piece in pieces:
            if found.tell() + len(piece) > limit:
                raise PayloadTooLarge(
                    f"The body is above {limit} bytes when it is decompressed; send a smaller image or fewer at "
                    "once.",
                    limit=limit,
                )
            take(len(piece))
            found.write(piece)
    except zlib.error:
        raise InvalidEncoding from None
    return found.getvalue()


def _inflate(pieces: Iterator[bytes], coding: str, deadline: float) -> Iterator[bytes]:
    """Yields the decompressed pieces of one coding. Raises zlib.error, InvalidEncoding, PayloadTooLarge."""
    start = b""
    while len(start) < 2 and (piece := next(pieces, None)) is not None:
        start += piece
    head = _GZIP_HEAD if coding == _GZIP else _head_of_deflate(start)
    stream, members = zlib.decompressobj(head), 1
    for piece in chain([start], pieces):
        left, more = piece, False
        while left or more:
            if stream.eof:
                members += 1
                if coding != _GZIP or members > _MOST_MEMBERS:
                    raise InvalidEncoding
                stream = zlib.decompressobj(head)
            if time.thread_time() > deadline:
                raise PayloadTooLarge("The body takes too long to decompress; send it without Content-Encoding.")
            found = stream.decompress(left, _PIECE)
            yield found
            left = stream.unconsumed_tail or stream.unused_data
            more = len(found) == _PIECE and not stream.eof
    if not stream.eof:
        raise InvalidEncoding


def _head_of_deflate(start: bytes) -> int:
    """Returns the `wbits` for a `deflate` body. RFC 9110 requires a zlib header, which some clients leave out."""
    is_zlib = len(start) > 1 and start[0] & 15 == zlib.DEFLATED and int.from_bytes(start[:2], "big") % 31 == 0
    return _ZLIB_HEAD if is_zlib else _NO_HEAD
