"""Knows under which prefix of paths a client reaches the server, where a proxy serves it under one."""

from starlette.types import Scope

from snapcap.service.api.middleware.request_scope import PREFIX
from snapcap.warmup.option import parse_root_path

HEADER = "X-Forwarded-Prefix"
_NAME = HEADER.lower().encode()


def prefix_of(scope: Scope) -> str:
    """The prefix that was set, such as "/cap", or else the one that a proxy names in X-Forwarded-Prefix.

    Any client can send that header, so it is used only where it is a plain path, and a cache must not keep a reply
    with it for another client."""
    noted: str = scope["state"].get(PREFIX, "")
    if noted:
        return noted
    given = [value for name, value in scope["headers"] if name == _NAME]
    try:
        return parse_root_path(given[0].decode("latin-1")) if len(given) == 1 else ""
    except ValueError:
        return ""
