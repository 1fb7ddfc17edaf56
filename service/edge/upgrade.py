"""Removes the offer of another protocol from the head of a request.

The function has no state; `protocol.py` holds the connection.
"""

from collections.abc import Iterable

import httptools

_NEGOTIATION = frozenset({b"upgrade", b"http2-settings"})


def head_without_upgrade(method: bytes, url: bytes, version: str, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the bytes of the head without the offer. All other fields stay unchanged and in their order, so that
    the head is parsed as strictly as before.

    Raises httptools.HttpParserError for CONNECT, which only a proxy answers."""
    if method == b"CONNECT":
        raise httptools.HttpParserError("CONNECT")
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    for name, value in fields:
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            kept = [token for token in tokens if token.lower() not in _NEGOTIATION]
            if kept:
                lines.append(b"connection: " + b", ".join(kept))
        elif name not in _NEGOTIATION:
            lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])
