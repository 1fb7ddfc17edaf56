"""Finds the path prefix under which a client reaches the server through a proxy."""

from starlette.types import Scope

from snapcap.service.api.middleware.request_scope import PREFIX
from snapcap.warmup.option import parse_root_path

HEADER = "X-Forwarded-Prefix"
_NAME = HEADER.lower().encode()


def prefix_of(scope: Scope) -> str:
    """Returns the configured prefix, such as "/cap", or else the prefix in X-Forwarded-Prefix, or "".

    Any client can send X-Forwarded-Prefix. The value is used only if it is a plain path, and a reply that contains
    it must not be cached for other clients."""
    noted: str = scope["state"].get(PREFIX, "")
    if noted:
        return noted
    given = [value for name, value in scope["headers"] if name == _NAME]
    try:
        return parse_root_path(given[0].decode("latin-1")) if len(given) == 1 else ""
    except ValueError:
        return ""
