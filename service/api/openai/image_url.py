"""Decides which image URLs may be fetched: the host must be allowed by the operator and have public addresses.

A client could otherwise make the server read resources that only the server can reach. Therefore the host must be
on the operator's list, all addresses of its name must be public, and `image_fetcher.py` connects to a checked
address.
"""

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import quote, unquote, urlsplit

from snapcap.models.dataclass import dataclass
from snapcap.service.errors import ImageUrlRefused

_PORTS = {"http": 80, "https": 443}
_MAX_URL = 8192  # characters, once they are percent-encoded
_MAX_HOST = 253
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ASCII = "".join(map(chr, range(0x21, 0x7F)))
# Networks whose gateways translate an address into any IPv4 address, also a private one: NAT64, and 6to4 relays.
_GATEWAYS = tuple(ipaddress.ip_network(each) for each in ("64:ff9b::/96", "64:ff9b:1::/48", "192.88.99.0/24"))
_FORBIDDEN = "Image URLs are not fetched by this server; send the image as a data URI."


@dataclass(frozen=True)
class Target:
    """Holds the server and the path of a request for an image. `path` includes the query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """Returns the value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


class AllowedHosts:
    """Holds the hosts that the operator allows: each is "host", for the default ports of http and https, or
    "host:port"."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self._hosts = frozenset(hosts)

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def target(self, url: str) -> Target:
        """Returns the parts of an http(s) URL. Raises ImageUrlRefused if the URL is not allowed or malformed."""
        if not self._hosts:
            raise ImageUrlRefused(_FORBIDDEN)
        try:
            if _CONTROL.search(url):
                raise ValueError
            encoded = percent_encoded(url.strip(" "))
            if len(encoded) > _MAX_URL:
                raise ValueError
            parts = urlsplit(encoded)
            scheme, host, port = parts.scheme, _ascii_host(parts.hostname or ""), parts.port
        except ValueError:
            like = f"https://host/photo.jpg, of at most {_MAX_URL} characters and without control characters"
            raise ImageUrlRefused(f"An image URL must be one such as {like}.") from None
        if scheme not in _PORTS or not host:
            raise ImageUrlRefused("An image URL must begin with http:// or https:// and a host.")
        if parts.username is not None or parts.password is not None:
            raise ImageUrlRefused("An image URL must not have a user name or password.")
        target = Target(scheme, host, port or _PORTS[scheme], _path(parts.path, parts.query))
        if target.authority not in self._hosts:
            raise ImageUrlRefused(
                f"Images are not fetched from {target.authority[:200]}; the operator allows hosts with "
                "--allow-image-host. Send the image as a data URI."
            )
        return target


def percent_encoded(url: str | bytes) -> str:
    """Returns a URL in printable ASCII: spaces and other letters are percent-encoded, as browsers do it."""
    return quote(url, safe=_ASCII)


def is_public(address: str) -> bool:
    """Tells whether an IP address can be reached from everywhere and stands for no other address."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and (ip.ipv4_mapped or ip.sixtofour or ip.teredo or ip.is_site_local):
        return False
    if any(ip in network for network in _GATEWAYS):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def _ascii_host(name: str) -> str:
    """Returns a host name in ASCII for the lookup, from Unicode or percent-encoded UTF-8. Raises ValueError."""
    name = unquote(name, errors="strict").rstrip(".")
    if len(name) > _MAX_HOST or not name.isprintable():
        raise ValueError
    return name if name.isascii() else name.encode("idna").decode()


def _path(path: str, query: str) -> str:
    return (path or "/") + (f"?{query}" if query else "")
