"""Decides what pages of other origins may ask, and writes the headers by which they may read a refusal.

A browser lets any page send some requests to any server without asking beforehand, and a page whose name is made to
lead to this server's address (DNS rebinding) is of the same origin to it. So requests are refused by what a browser
says of the page, and by the name under which it reaches the server. What the application answers to pages that may
ask has its headers from `cross_origin.py`.
"""

import re
from collections.abc import Collection, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from snapcap.service.errors import HostRefused, OriginRefused

EVERY_ORIGIN = EVERY_HOST = "*"
_READS = frozenset({"GET", "HEAD", "OPTIONS"})  # a page of another origin cannot see what they return
# Orchestrators and scrapers ask by whatever name they know, and the replies hold nothing of any client.
_BY_ANY_NAME = frozenset({"/livez", "/readyz", "/health", "/v2/health/live", "/v2/health/ready", "/metrics"})
# Addresses, and names that nobody can register: of one label, of this machine, of a Service in Kubernetes.
_OWN_NAME = re.compile(
    r"[0-9.]{1,15}|\[[0-9a-f:.]{2,45}\]|[a-z0-9_-]{1,63}"
    r"|[a-z0-9._-]{1,253}\.localhost|[a-z0-9._-]{1,253}\.svc(\.cluster\.local)?"
)
_PORT = re.compile(r":[0-9]{0,5}$")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def origin_headers(origin: bytes | None, allowed: Collection[str]) -> Mapping[str, str]:
    """For a reply that says nothing but why a request is refused, as far as its `Origin` is known by then.

    Args:
        origin: the value of that header; None where there is none, or its head has not come so far.
        allowed: as `scheme://host:port`, or "*" for every one.
    """
    if EVERY_ORIGIN in allowed:
        return {"access-control-allow-origin": EVERY_ORIGIN}
    if not allowed:
        return {}
    text = "" if origin is None else origin.decode("latin-1")
    shown = {"access-control-allow-origin": text} if text in allowed else {}
    return {**shown, "vary": "Origin"}


class PageGuard:
    """ASGI middleware: refuses a request of a page that may not ask before anything else of it is read."""

    def __init__(self, app: ASGIApp, origins: Collection[str], hosts: Collection[str] | None) -> None:
        """`origins`: whose pages may ask, as `scheme://host:port`, or "*". `hosts`: names by which the server may
        be reached besides its own, "*.example.com" for all within; None: any name."""
        self._app = app
        self._origins = frozenset(origins)
        self._hosts = None if hosts is None else frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises HostRefused, OriginRefused, and what the application raises."""
        if scope["type"] == "http":
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        host = forwarded = origin = site = ""
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1").lower()
            # A browser sends one of each. Several are joined, which is the name of no origin and of no site.
            elif name == b"origin":
                origin += ("," if origin else "") + value.decode("latin-1")
            elif name == b"sec-fetch-site":
                site += ("," if site else "") + value.decode("latin-1")
            elif name == b"x-forwarded-host":
                forwarded = value.decode("latin-1").lower().partition(",")[0].strip()
        if self._hosts is not None and scope["path"] not in _BY_ANY_NAME and not self._is_ours(host):
            raise HostRefused(host)
        if scope["method"] in _READS or site in ("same-origin", "none") or not (origin or site):
            return
        if EVERY_ORIGIN in self._origins or origin in self._origins:
            return
        # Only over https and on localhost a browser says of which site the page is.
        if site or not _is_same(origin, (host, forwarded)):
            raise OriginRefused(origin or f"a {site} page", "origin")

    def _is_ours(self, host: str) -> bool:
        name = _PORT.sub("", host).rstrip(".")
        if not name or _OWN_NAME.fullmatch(name) or self._hosts is None or name in self._hosts:
            return True
        return any(name.endswith(each[1:]) for each in self._hosts if each.startswith("*."))


def _is_same(origin: str, hosts: Collection[str]) -> bool:
    """Whether an origin is that of a server which is reached by one of these names. A proxy may speak TLS for it,
    or name it in X-Forwarded-Host, which a page cannot set without asking beforehand."""
    scheme, _, authority = origin.partition("://")
    default = _DEFAULT_PORTS.get(scheme, "-")
    return any(host and authority.removesuffix(default) == host.removesuffix(default) for host in hosts)
