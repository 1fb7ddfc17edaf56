"""Fetches images from URLs. Connects only to addresses that were checked after the lookup of the host name."""

import asyncio
import functools
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urljoin

from snapcap.models.processing.image_formats import MEDIA_TYPES
from snapcap.service.api.bodies.body import BodyClock, BodyLimits
from snapcap.service.api.openai.image_url import AllowedHosts, Target, is_public, percent_encoded
from snapcap.service.errors import ImageNotFetched, ImageUrlRefused
from snapcap.service.limits import MAX_IMAGE_FETCHES, ImageFetchesFull
from snapcap.service.memory import BodyAccount

if TYPE_CHECKING:
    import h11

MAX_REDIRECTS = 3
_CHUNK = 64 << 10
# AVIF and HEIC have a lower quality value in Accept: they take long to decode, and not every installation reads
# them.
_LAST = ("image/avif", "image/heic")
_ACCEPT = ",".join(f"{name};q=0.5" if name in _LAST else name for name in (*MEDIA_TYPES, "*/*;q=0.1"))
_LONGEST_SHOWN = 200  # characters of a URL in a message
_REDIRECTS = frozenset({301, 302, 303, 307, 308})

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """Returns the IP addresses of a host name. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


class ImageFetcher:
    """Fetches images from allowed hosts, under the limits of request bodies."""

    def __init__(
        self,
        hosts: AllowedHosts,
        limits: BodyLimits,
        resolve: Resolve = resolve,
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        self._hosts = hosts
        self._limits = limits
        self._resolve = resolve
        self._tls = functools.cache(tls)  # cached: reading the certificates takes 20 ms
        self._running = 0

    @property
    def may_fetch(self) -> bool:
        """Tells whether any host is allowed."""
        return bool(self._hosts)

    async def fetch(self, url: str, account: BodyAccount | None = None) -> bytes:
        """Returns the bytes of the image at a URL. The bytes count against `account`.

        Raises ImageUrlRefused, ImageNotFetched, ImageFetchesFull, BodyMemoryFull."""
        target = self._hosts.target(url)
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
                    target = self._hosts.target(url)
        except TimeoutError:
            raise ImageNotFetched("The image at the URL took too long; send it as a data URI.") from None
        except (ImageUrlRefused, ImageNotFetched) as error:
            if not redirect:
                raise
            raise type(error)(f"The image URL redirects to {redirect}. {error.detail}") from None
        finally:
            self._running -= 1
        raise ImageNotFetched(f"The image URL redirects more than {MAX_REDIRECTS} times.")

    async def _get(self, target: Target, deadline: asyncio.Timeout, account: BodyAccount | None) -> bytes | str:
        """Returns the body of the reply, or the location that it redirects to."""
        reader, writer = await self._open(target)
        try:
            return await self._exchange(target, reader, writer, deadline, account)
        except (OSError, EOFError):
            raise ImageNotFetched(f"{target.authority} closed the connection before the image was there.") from None
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
        raise ImageNotFetched(f"The image host {target.authority} cannot be connected to.")

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
        received, chunks = 0, []
        clock = BodyClock(self._limits)
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError:
                raise ImageNotFetched(f"{target.authority} does not send a whole HTTP response.") from None
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_CHUNK))
            elif isinstance(event, h11.Response):
                location = _read_head(target, event)
                if location is not None:
                    return location
            elif isinstance(event, h11.Data):
                received += len(event.data)
                if received > self._limits.max_bytes:
                    raise ImageNotFetched(f"The image at the URL is above {self._limits.max_bytes} bytes.")
                if account is not None:
                    account.take(len(event.data))
                chunks.append(bytes(event.data))
                clock.received(len(event.data))
                deadline.reschedule(clock.end)
            elif isinstance(event, h11.EndOfMessage):
                return b"".join(chunks)


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise ImageNotFetched("The image URL redirects to what is no URL.") from None


def _shown(url: str) -> str:
    """Returns the URL of a redirect for an error message, without query and password: both may be secrets of the
    host."""
    scheme, separator, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"[:_LONGEST_SHOWN]


def _read_head(target: Target, response: "h11.Response") -> str | None:
    """Returns the address of a redirect, or None if the image follows. Raises ImageNotFetched."""
    fields = dict(response.headers)
    if response.status_code in _REDIRECTS and b"location" in fields:
        return percent_encoded(fields[b"location"])
    if response.status_code != 200:
        raise ImageNotFetched(f"{target.authority} answered {response.status_code} for the image.")
    if fields.get(b"content-encoding", b"identity") != b"identity":
        raise ImageNotFetched(f"{target.authority} sends the image compressed, which was not asked for.")
    return None
