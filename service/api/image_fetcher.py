"""Fetches images from the URLs that the operator allows.

A client could otherwise make the server read resources that only the server can reach. Therefore the host must be
on the operator's list, all addresses of its name must be public, and the connection is made to a checked address.
"""

import asyncio
import functools
import io
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urljoin, urlsplit

from snapcap.models.dataclass import dataclass
from snapcap.models.processing.image_formats import MEDIA_TYPES
from snapcap.service.errors import ImageNotFetched, ImageUrlRefused
from snapcap.service.http.bodies import BodyClock, BodyLimits
from snapcap.service.limits import MAX_IMAGE_FETCHES, ImageFetchesFull
from snapcap.service.memory import BodyAccount
from snapcap.service.telemetry.tracing import without_credentials

if TYPE_CHECKING:
    import h11

MAX_REDIRECTS = 3
_CHUNK = 64 << 10
_LOOKUPS = 8  # lookups of host names at once
# A response may have so many parts (chunks, interim responses), and one more for each so many bytes of the image:
# the event loop spends as much time on a part of one byte as on one of 64 KiB.
_FEW_PARTS = 1000
_BYTES_A_PART = 256
# AVIF and HEIC have a lower quality value in Accept: they take long to decode, and not every installation reads
# them.
_LAST = ("image/avif", "image/heic")
_ACCEPT = ",".join(f"{name};q=0.5" if name in _LAST else name for name in (*MEDIA_TYPES, "*/*;q=0.1"))
_LONGEST_SHOWN = 200  # characters of a URL in a message
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
_PORTS = {"http": 80, "https": 443}
_MAX_URL = 8192  # characters, once they are percent-encoded
_MAX_HOST = 253
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ASCII = "".join(map(chr, range(0x21, 0x7F)))
# Networks whose gateways translate an address into any IPv4 address, also a private one: NAT64, and 6to4 relays.
_GATEWAYS = tuple(ipaddress.ip_network(each) for each in ("64:ff9b::/96", "64:ff9b:1::/48", "192.88.99.0/24"))
_FORBIDDEN = (
    "This server does not fetch image URLs; send the image as base64. The operator allows hosts with "
    "--allow-image-host."
)


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


class Resolver:
    """Looks up the addresses of host names, on threads of its own.

    The event loop's threads would keep a server that ends: the loop waits for them, and a lookup may take a minute
    although its request has ended."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="lookups")

    async def __call__(self, host: str, port: int) -> list[str]:
        """Returns the IP addresses of a host name. Raises OSError."""
        look = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, look)
        return list(dict.fromkeys(str(address[4][0]) for address in found))


class ImageFetcher:
    """Fetches images from allowed hosts, under the limits of request bodies."""

    def __init__(
        self,
        hosts: Iterable[str],
        limits: BodyLimits,
        resolve: Resolve | None = None,
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        """`hosts` are those that the operator allows: each is "host", for the default ports of http and https, or
        "host:port"."""
        self._hosts = frozenset(hosts)
        self._limits = limits
        self._resolve = resolve or Resolver()
        self._tls = functools.cache(tls)  # cached: reading the certificates takes 20 ms
        self._running = 0

    async def fetch(self, url: str, account: BodyAccount | None = None) -> bytes:
        """Returns the bytes of the image at a URL. The bytes count against `account`.

        Raises ImageUrlRefused, ImageNotFetched, ImageFetchesFull, BodyMemoryFull."""
        target = self._target(url)
        if self._running >= MAX_IMAGE_FETCHES:
            raise ImageFetchesFull
        self._running += 1
        redirect = ""
        try:
            async with asyncio.timeout(self._limits.timeout) as deadline:
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._get(target, deadline, account)
                    if isinstance(found, bytes):
                        return found
                    url = _joined(url, found)
                    redirect = _shown(url)
                    target = self._target(url)
        except TimeoutError:
            raise ImageNotFetched("The image at the URL took too long; send it as base64.") from None
        except (ImageUrlRefused, ImageNotFetched) as error:
            if not redirect:
                raise
            raise type(error)(f"The image URL redirects to {redirect}. {error.detail}") from None
        finally:
            self._running -= 1
        raise ImageNotFetched(f"The image URL redirects more than {MAX_REDIRECTS} times.")

    def _target(self, url: str) -> Target:
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
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        target = Target(scheme, host, port or _PORTS[scheme], path)
        if target.authority not in self._hosts:
            raise ImageUrlRefused(
                f"The server does not fetch images from {target.authority[:200]}; the operator allows hosts with "
                "--allow-image-host. Send the image as base64."
            )
        return target

    async def _get(self, target: Target, deadline: asyncio.Timeout, account: BodyAccount | None) -> bytes | str:
        """Returns the body of the reply, or the location that it redirects to."""
        reader, writer = await self._open(target)
        try:
            return await self._exchange(target, reader, writer, deadline, account)
        except (OSError, EOFError):
            raise ImageNotFetched(
                f"The image host {target.authority} closed the connection before the end of the image."
            ) from None
        finally:
            # `abort` does not wait, unlike `close`, which would wait until the host has closed the connection.
            writer.transport.abort()

    async def _open(self, target: Target) -> Streams:
        try:
            addresses = await self._resolve(target.host, target.port)
        except (OSError, UnicodeError):
            raise ImageNotFetched(f"The image host {target.authority} has no address.") from None
        if not addresses or not all(is_public(address) for address in addresses):
            raise ImageUrlRefused(f"The image host {target.authority} is not at a public address.")
        for address in addresses:
            try:
                return await self._connect(address, target)
            except OSError:
                continue
        raise ImageNotFetched(f"The server cannot connect to the image host {target.authority}.")

    async def _connect(self, address: str, target: Target) -> Streams:
        if target.scheme == "http":
            return await asyncio.open_connection(address, target.port)
        context = await asyncio.to_thread(self._tls)
        return await asyncio.open_connection(address, target.port, ssl=context, server_hostname=target.host)

    async def _exchange(
        self,
        target: Target,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        deadline: asyncio.Timeout,
        account: BodyAccount | None,
    ) -> bytes | str:
        import h11  # noqa: PLC0415 - most servers never fetch

        connection = h11.Connection(h11.CLIENT)
        fields = {"Host": target.authority, "User-Agent": "snapcap", "Accept": _ACCEPT, "Connection": "close"}
        request = h11.Request(method="GET", target=target.path, headers=list(fields.items()))
        writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
        received, parts, image = 0, 0, io.BytesIO()
        clock = BodyClock(self._limits)
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError:
                raise ImageNotFetched(
                    f"The image host {target.authority} did not send a complete HTTP response."
                ) from None
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_CHUNK))
                continue
            parts += 1
            if parts > _FEW_PARTS + received // _BYTES_A_PART:
                raise ImageNotFetched(
                    f"The image host {target.authority} sent the image in parts that are too small."
                )
            await asyncio.sleep(0)  # `read` returns at once if bytes are there: a fast host would get every turn
            if isinstance(event, h11.Response):
                location = _read_head(target, event)
                if location is not None:
                    return location
            elif isinstance(event, h11.Data):
                received += len(event.data)
                if received > self._limits.max_bytes:
                    raise ImageNotFetched(f"The image at the URL is above {self._limits.max_bytes} bytes.")
                if account is not None:
                    account.take(len(event.data))
                image.write(event.data)
                clock.received(len(event.data))
                deadline.reschedule(clock.end)
            elif isinstance(event, h11.EndOfMessage):
                return image.getvalue()


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise ImageNotFetched("The image URL redirects to an invalid URL.") from None


def _shown(url: str) -> str:
    """Returns the URL of a redirect for an error message, without query and password: both may be secrets of the
    host."""
    return without_credentials(url)[:_LONGEST_SHOWN]


def _read_head(target: Target, response: "h11.Response") -> str | None:
    """Returns the address of a redirect, or None if the image follows. Raises ImageNotFetched."""
    fields = dict(response.headers)
    if response.status_code in _REDIRECTS and b"location" in fields:
        return percent_encoded(fields[b"location"])
    if response.status_code != 200:
        raise ImageNotFetched(f"The image host {target.authority} answered {response.status_code} for the image.")
    if fields.get(b"content-encoding", b"identity") != b"identity":
        raise ImageNotFetched(
            f"The image host {target.authority} compressed the image, although the request did not allow it."
        )
    return None
