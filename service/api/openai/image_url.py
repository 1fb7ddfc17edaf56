"""Decides which image URLs may be fetched: those of hosts that the operator has named, at public addresses.

A server that fetches what a client names can be made to read what only the server can reach. So the host must be on
the list, every address that its name has must be public, and `image_fetcher.py` connects to one that was checked.
"""

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from snapcap.models.dataclass import dataclass
from snapcap.service.errors import ImageUrlRefused

_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"[\x21-\x7e]{1,8192}")
# Addresses that a gateway on the way turns into an IPv4 address, whatever that is: NAT64, and 6to4 relays.
_GATEWAYS = tuple(ipaddress.ip_network(each) for each in ("64:ff9b::/96", "64:ff9b:1::/48", "192.88.99.0/24"))
_FORBIDDEN = "Image URLs are not fetched by this server; send the image as a data URI."


@dataclass(frozen=True)
class Target:
    """What to ask for, and of whom. `path` includes the query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


class AllowedHosts:
    """The hosts that the operator named, each as "host", for the ports of http and https, or as "host:port"."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self._hosts = frozenset(hosts)

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def target(self, url: str) -> Target:
        """The parts of an http(s) URL. Raises ImageUrlRefused when it is not allowed or cannot be read."""
        if not self._hosts:
            raise ImageUrlRefused(_FORBIDDEN)
        if not _URL.fullmatch(url):
            raise ImageUrlRefused("The image URL is too long, or has characters that must be percent-encoded.")
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            raise ImageUrlRefused("The image URL cannot be read; send one as https://host/photo.jpg.") from None
        if scheme not in _PORTS or not host:
            raise ImageUrlRefused("The image URL must begin with http:// or https:// and a host.")
        if parts.username is not None or parts.password is not None:
            raise ImageUrlRefused("The image URL must not have a user name or password.")
        target = Target(scheme, host, port or _PORTS[scheme], _path(parts.path, parts.query))
        if target.authority not in self._hosts:
            raise ImageUrlRefused(
                f"Images are not fetched from {target.authority[:200]}; the operator allows hosts with "
                "--allow-image-host. Send the image as a data URI."
            )
        return target


def is_public(address: str) -> bool:
    """Whether an IP address can be reached from everywhere, and stands for no other one."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and (ip.ipv4_mapped or ip.sixtofour or ip.teredo or ip.is_site_local):
        return False
    if any(ip in network for network in _GATEWAYS):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def _path(path: str, query: str) -> str:
    return (path or "/") + (f"?{query}" if query else "")
