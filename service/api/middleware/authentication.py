"""Refuses requests without a valid API key before their bodies are read.

Only a server with keys imports `api_keys.py`.
"""

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from snapcap.service.errors import Unauthorized
from snapcap.service.readiness import is_probe

if TYPE_CHECKING:
    from snapcap.service.api.middleware.api_keys import ApiKeys

# Browsers open pages without a key, and the pages hold no secret: all servers have the same.
_PAGES = frozenset({"/", "/docs", "/openapi.json"})
_BEARER = b"bearer "


class Authentication:
    """Requires the header `Authorization: Bearer KEY`; otherwise raises Unauthorized before the body is read. ASGI
    middleware."""

    def __init__(self, app: ASGIApp, keys: "ApiKeys") -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope["method"], scope["path"]):
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or given[0][: len(_BEARER)].lower() != _BEARER:
            raise Unauthorized(given=False)
        if not self._keys.accept(given[0][len(_BEARER) :].strip()):
            raise Unauthorized(given=True)


def is_open(method: str, path: str) -> bool:
    """Tells whether a request needs no key."""
    return method in ("GET", "HEAD") and (path in _PAGES or is_probe(path))
