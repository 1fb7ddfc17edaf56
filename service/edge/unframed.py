"""Ends a reply of unknown length by closing the connection, where the client does not know chunks.

RFC 9112 forbids Transfer-Encoding in a reply to HTTP/1.0, which some proxies speak to servers. uvicorn sends it.
"""

from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def until_closed(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """The application, whose replies without a Content-Length have no framing. The connection of such a `cycle` is
    closed after its reply anyway."""

    async def unframed(scope: Any, receive: Any, send: Any) -> None:
        unknown = False

        async def send_plain(message: Any) -> None:
            nonlocal unknown
            if message["type"] == "http.response.start":
                unknown = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = False if unknown else None
            elif unknown:  # each part is all that is expected, as nobody knows what will come
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return unframed
