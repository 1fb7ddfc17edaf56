"""Rewrites the head of a request that asks for another protocol into one that does not ask.

It is a function of the head alone; the connection is `protocol.py`'s.
"""

from collections.abc import Iterable

import httptools

_NEGOTIATION = frozenset({b"upgrade", b"http2-settings"})


def head_without_upgrade(method: bytes, url: bytes, version: str, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """All other fields stay as they are and in their order, so that it is no less strictly parsed.

    Raises httptools.HttpParserError for CONNECT, which is no request of a server's own."""
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
