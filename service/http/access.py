"""Decides which requests are allowed: by API key, by the page that sends them, and by the host name they name.

A browser lets any page send some requests to any server without a preflight. With DNS rebinding, the host name of a
foreign page resolves to this server's address, so that the browser treats both as the same origin. Therefore
requests are refused by the headers with which a browser describes the page, and by the host name in the request.
`cross_origin.py` writes the CORS headers of all replies but early refusals.
"""

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from snapcap.service.config.reader import SettingsError
from snapcap.service.config.settings import HttpSettings
from snapcap.service.errors import HostRefused, OriginRefused, Unauthorized
from snapcap.service.readiness import is_probe
from snapcap.warmup.option import DEFAULT_PORTS

# Browsers open pages without a key, and the pages hold no secret: all servers have the same.
_PAGES = frozenset({"/", "/docs", "/openapi.json"})
_BEARER = b"bearer "
_logger = logging.getLogger("snapcap.server")
# The syntax of a bearer token (RFC 6750, b64token).
_KEY = re.compile(r"[A-Za-z0-9\-._~+/]+=*")
EVERY_ORIGIN = EVERY_HOST = "*"
_READS = frozenset({"GET", "HEAD", "OPTIONS"})  # a page of another origin cannot see the reply
_PREFLIGHT = b"access-control-request-method"  # only a preflight has this header
# IP addresses, and names that nobody can register: single labels, and names below the domains that are reserved for
# one machine, one network or one cluster. Docker and Podman name their host `host.docker.internal` and
# `host.containers.internal`. Any machine of a network can claim a name below `.local` (RFC 6762), so only this
# machine's own name is accepted there.
_OWN_NAME = re.compile(
    r"[0-9.]{1,15}|\[[0-9a-f:.]{2,45}\]|[a-z0-9_-]{1,63}"
    r"|[a-z0-9._-]{1,253}\.(?:localhost|internal|home\.arpa|svc|svc\.cluster\.local)"
)
_PORT = re.compile(r":[0-9]{0,5}$")


class ApiKeys:
    """Checks keys against digests; keeps no key. The time of a check does not depend on the sent or the matching
    key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def accept(self, key: bytes) -> bool:
        """Tells whether `key` is one of the keys."""
        digest = hashlib.sha256(key).digest()
        accepted = False
        for known in self._digests:
            accepted |= hmac.compare_digest(digest, known)
        return accepted


def read_api_keys(file: Path) -> ApiKeys:
    """Reads one key a line. Skips empty lines and lines that begin with #.

    Raises SettingsError if the file cannot be read, a line is not a key, or the file has no key. Logs a warning if
    all users of the machine may read the file."""
    try:
        lines = file.read_text("utf-8").splitlines()
        mode = file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise SettingsError(f"--api-key-file {file} cannot be read: {reason}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not _KEY.fullmatch(key):
            # The message leaves the line out: messages go to a log.
            raise SettingsError(
                f"--api-key-file {file} line {number} is not a key: use letters, digits and -._~+/ only"
            )
        keys.append(key)
    if not keys:
        raise SettingsError(f"--api-key-file {file} has no key: write one a line, or leave the option out")
    if mode & stat.S_IROTH:
        _logger.warning("everybody may read the API keys", extra={"fields": {"file": str(file), "do": "chmod 600"}})
    return ApiKeys(keys)


def is_open(method: str, path: str) -> bool:
    """Tells whether a request needs no key."""
    return method in ("GET", "HEAD") and (path in _PAGES or is_probe(path))


class Guard:
    """Refuses requests of pages that are not allowed, and requests without a key, before their bodies are read. An
    ASGI middleware."""

    def __init__(self, app: ASGIApp, http: HttpSettings, keys: ApiKeys | None) -> None:
        """`http`: has the allowed origins, each as `scheme://host:port`, or "*", and the host names that are
        accepted besides the server's own; "*.example.com" accepts all subdomains. `keys`: a request needs one of
        them, as `Authorization: Bearer KEY`; None: no key."""
        self._app = app
        self._keys = keys
        self._origins = frozenset(http.origins)
        # The host check stops pages that use DNS rebinding. They have no API key, so a server with keys needs no
        # check.
        self._any_host = EVERY_HOST in http.hosts or (keys is not None and not http.hosts)
        own = os.uname().nodename.lower()
        self._hosts = frozenset((*http.hosts, http.host.lower(), own, f"{own.partition('.')[0]}.local"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes an allowed request on. Raises HostRefused, OriginRefused, Unauthorized, and the exceptions of the
        application."""
        if scope["type"] == "http":
            self._check_page(scope)
            if self._keys is not None and not is_open(scope["method"], scope["path"]):
                _check_key(scope, self._keys)
        await self._app(scope, receive, send)

    def _check_page(self, scope: Scope) -> None:
        host = forwarded = origin = site = ""
        preflight = False
        # A browser sends each header once. Several origins or sites are joined, so that they match none.
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1").lower()
            elif name == b"origin":
                origin += ("," if origin else "") + value.decode("latin-1")
            elif name == b"sec-fetch-site":
                site += ("," if site else "") + value.decode("latin-1")
            elif name == b"x-forwarded-host":
                forwarded = value.decode("latin-1").lower().partition(",")[0].strip()
            elif name == _PREFLIGHT:
                preflight = scope["method"] == "OPTIONS"
        # Orchestrators and scrapers may use any name of the server, and the replies contain no data of clients.
        by_any_name = is_probe(scope["path"]) or scope["path"] == "/metrics"
        if not (self._any_host or by_any_name or self._is_ours(host)):
            raise HostRefused(host)
        if preflight and origin:  # `CrossOrigin` answers all preflights if the operator allows an origin
            raise OriginRefused(origin, "origin")
        if scope["method"] in _READS or site in ("same-origin", "none") or not (origin or site):
            return
        if EVERY_ORIGIN in self._origins or origin in self._origins:
            return
        # A browser sends Sec-Fetch-Site only over https and to localhost.
        if site or not _is_same(origin, (host, forwarded)):
            raise OriginRefused(origin or f"a {site} page", "origin")

    def _is_ours(self, host: str) -> bool:
        name = _PORT.sub("", host).rstrip(".")
        if not name or _OWN_NAME.fullmatch(name) or name in self._hosts:
            return True
        return any(name.endswith(each[1:]) for each in self._hosts if each.startswith("*."))


def _check_key(scope: Scope, keys: ApiKeys) -> None:
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1 or given[0][: len(_BEARER)].lower() != _BEARER:
        raise Unauthorized(given=False)
    if not keys.accept(given[0][len(_BEARER) :].strip()):
        raise Unauthorized(given=True)


def _is_same(origin: str, hosts: Collection[str]) -> bool:
    """Tells whether an origin has one of these host names. The scheme does not matter, as a proxy may terminate
    TLS. A proxy may put the name in X-Forwarded-Host, which a page cannot set without a preflight."""
    scheme, _, authority = origin.partition("://")
    default = DEFAULT_PORTS.get(scheme, "-")
    return any(host and authority.removesuffix(default) == host.removesuffix(default) for host in hosts)


def origin_headers(origin: bytes | None, allowed: Collection[str]) -> Mapping[str, str]:
    """Returns the CORS headers of an early refusal.

    Args:
        origin: the value of the `Origin` header; None if it is missing or has not been received yet.
        allowed: allowed origins, each as `scheme://host:port`, or "*" for any origin.
    """
    if EVERY_ORIGIN in allowed:
        return {"access-control-allow-origin": EVERY_ORIGIN}
    if not allowed:
        return {}
    text = "" if origin is None else origin.decode("latin-1")
    shown = {"access-control-allow-origin": text} if text in allowed else {}
    return {**shown, "vary": "Origin"}
