"""Images from URLs: allowed hosts at public addresses only, whatever a name or a redirect says.

A local server plays the public one: the names are resolved by the test, and the one public address that it gives is
led back to this machine below the checks."""

import asyncio
import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h11
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.testclient import TestClient
from support.servers.image_host import ANSWERS, MAX, serve
from support.servers.live_app import create_app

from snapcap.service.api.app import Services
from snapcap.service.api.image_fetcher import MAX_REDIRECTS, ImageFetcher, Resolver, is_public
from snapcap.service.config.settings import HttpSettings
from snapcap.service.errors import ImageNotFetched, ImageUrlRefused, ServiceError
from snapcap.service.http.bodies import BodyLimits
from snapcap.service.limits import MAX_IMAGE_FETCHES, ImageFetchesFull

PUBLIC = "93.184.215.14"


@pytest.fixture
def host() -> Iterator[Any]:
    yield from serve()


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were connected to. The public one is this machine; any other would be a hole."""
    connected: list[str] = []
    open_connection = asyncio.open_connection

    async def connect(address: str, port: int, **options: Any) -> Any:
        connected.append(address)
        if address != PUBLIC:
            raise ConnectionRefusedError
        return await open_connection("127.0.0.1", port, **options)

    monkeypatch.setattr("snapcap.service.api.image_fetcher.asyncio.open_connection", connect)
    return connected


def fetcher(
    *hosts: str, limits: BodyLimits | None = None, addresses: Any = (PUBLIC,), **options: Any
) -> ImageFetcher:
    """`addresses`: what every name has, or a function of the name."""

    async def resolve(name: str, _port: int) -> Any:
        return addresses(name) if callable(addresses) else addresses

    return ImageFetcher(hosts, limits or BodyLimits(MAX, 10.0), resolve, **options)


def fetch(fetcher: ImageFetcher, url: str) -> bytes:
    return asyncio.run(fetcher.fetch(url))


def refused(fetcher: ImageFetcher, url: str, kind: type[ServiceError] = ImageUrlRefused) -> str:
    with pytest.raises(kind) as caught:
        fetch(fetcher, url)
    assert caught.value.status == 422
    return caught.value.detail


def test_an_allowed_host_is_asked_by_its_name_at_the_address_that_was_checked(host, connected) -> None:
    name = f"images.example:{host.server_port}"
    assert fetch(fetcher(name), f"http://IMAGES.example:{host.server_port}/image?size=9#part") == b"the image"
    assert connected == [PUBLIC]
    path, headers = host.asked[0]
    assert path == "/image?size=9"
    assert headers["Host"] == name
    assert "Authorization" not in headers
    assert headers["Accept"].startswith(
        "image/jpeg,image/png,image/webp,image/gif,image/bmp,image/tiff,image/avif;"
    )


def test_a_redirect_is_followed_and_checked_again(host, connected) -> None:
    port = host.server_port
    inside = {"inside.example": ["10.0.0.7"]}
    allowed = fetcher(f"images.example:{port}", "inside.example", addresses=lambda name: inside.get(name, [PUBLIC]))
    url = f"http://images.example:{port}"
    assert fetch(allowed, f"{url}/moved") == b"the image"
    assert "not at a public address" in refused(allowed, f"{url}/inside")
    assert "169.254.169.254" in refused(allowed, f"{url}/metadata")
    assert "must begin with http" in refused(allowed, f"{url}/file")
    refused(allowed, f"{url}/broken", ImageNotFetched)
    assert "answered 302" in refused(allowed, f"{url}/nowhere", ImageNotFetched)
    host.asked.clear()
    assert "more than 3 times" in refused(allowed, f"{url}/round", ImageNotFetched)
    assert len(host.asked) == MAX_REDIRECTS + 1
    assert set(connected) == {PUBLIC}


def test_spaces_and_other_letters_are_asked_for_as_browsers_do(host, connected) -> None:
    name = f"images.example:{host.server_port}"
    allowed = fetcher(name, f"xn--kln-sna.example:{host.server_port}")
    for url in (f"http://{name}/letters", f" http://{name}/köln/a b/image?from=ö x#ü "):
        assert fetch(allowed, url) == b"the image"
        assert host.asked[-1][0] == "/k%C3%B6ln/a%20b/image?from=%C3%B6%20x"
    for written in ("KÖLN", "k%C3%B6ln", "xn--kln-sna"):
        assert fetch(allowed, f"http://{written}.example:{host.server_port}/image") == b"the image"
        assert host.asked[-1][1]["Host"] == f"xn--kln-sna.example:{host.server_port}"


def test_a_message_names_the_redirect_that_is_at_fault(host, connected) -> None:
    port = host.server_port
    url = f"http://images.example:{port}"
    allowed = fetcher(f"images.example:{port}")
    for path, redirect, says in (
        ("/astray", f"{url}/missing", f"The image host images.example:{port} answered 404 for the image."),
        (
            "/inside",
            "http://inside.example/image",
            "The server does not fetch images from inside.example; the operator",
        ),
        ("/file", "file:///etc/passwd", "An image URL must begin with http:// or https://"),
        ("/password", "http://images.example/image", "An image URL must not have a user name or password."),
    ):
        kind = ImageNotFetched if path == "/astray" else ImageUrlRefused
        message = refused(allowed, url + path, kind)
        assert message.startswith(f"The image URL redirects to {redirect}. {says}")
        assert "secret" not in message
        assert "pass@" not in message
    assert (
        refused(allowed, f"{url}/missing", ImageNotFetched)
        == f"The image host images.example:{port} answered 404 for the image."
    )


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["10.1.2.3"],
        ["172.16.0.1"],
        ["192.168.1.1"],
        ["169.254.169.254"],
        ["100.64.0.1"],
        ["0.0.0.0"],
        ["224.0.0.1"],
        ["240.0.0.1"],
        ["192.0.2.1"],
        ["192.88.99.1"],
        ["::1"],
        ["::"],
        ["fe80::1%eth0"],
        ["fec0::1"],
        ["fd00::1"],
        ["ff02::1"],
        ["::ffff:10.0.0.1"],
        ["::ffff:93.184.215.14"],
        ["64:ff9b::a00:1"],
        ["64:ff9b:1::a00:1"],
        ["2002:a00:1::"],
        ["2001:0:a00:1::"],
        [PUBLIC, "10.0.0.1"],  # a name that has both is a name that can change its mind
        [],
    ],
    ids=str,
)
def test_a_name_that_leads_inside_is_refused_before_anything_is_connected(connected, addresses: list[str]) -> None:
    assert "not at a public address" in refused(
        fetcher("images.example", addresses=addresses), "http://images.example/image"
    )
    assert connected == []


def test_public_addresses_are_public() -> None:
    assert all(is_public(address) for address in (PUBLIC, "1.1.1.1", "2606:4700:4700::1111"))


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/image",
        "http://images.example.evil.test/image",
        "http://evil.test/images.example",
        "http://images.example:81/image",
        "http://127.0.0.1/image",
        "http://[::1]/image",
        "http://2130706433/image",
        "http://user:password@images.example/image",
        "http://images.example@127.0.0.1/image",
        "http://images.example\\@127.0.0.1/image",
        "http://127.0.0.1#@images.example/image",
        "http://127.0.0.1?@images.example/image",
        "http://images.example/a\r\nX: y",
        "http://images.examplé/image",
        "http://" + "é" * 9_000 + "/image",
        "http://images.example/" + "é" * 2_000,
        "http://images.example%2F@127.0.0.1/image",
        "http://images%2eexample%0d%0aX:80/image",
        "http://images.example/\ud800",
        "http://images.example/a\tb",
        "http://%ff.example/image",
        "http://images.example／@127.0.0.1/image",
        "http://images.example:port/image",
        "http://[images.example/image",
        "http:///image",
        "ftp://images.example/image",
        "http://images.example/" + "a" * 9000,
    ],
)
def test_urls_that_are_refused_without_asking_anybody(connected, url: str) -> None:
    def resolve(_name: str) -> Any:
        raise AssertionError("no name is to be resolved")

    assert refused(fetcher("images.example", addresses=resolve), url).endswith(".")
    assert connected == []


def test_without_a_list_nothing_is_fetched() -> None:
    assert "--allow-image-host" in refused(fetcher(), "http://images.example/image")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/missing", "answered 404"),
        ("/large", "above 100000 bytes"),
        ("/endless", "above 100000 bytes"),
        ("/tiny", "parts that are too small"),
        ("/interim", "parts that are too small"),
        ("/zipped", "compressed"),
        ("/cut", "complete HTTP response"),
        ("/no-http", "complete HTTP response"),
    ],
)
def test_what_comes_instead_of_an_image(host, connected, path: str, says: str) -> None:
    name = f"images.example:{host.server_port}"
    assert says in refused(fetcher(name), f"http://{name}{path}", ImageNotFetched)


def test_a_host_that_sends_tiny_parts_fast_does_not_stop_the_event_loop(host, connected, monkeypatch) -> None:
    name = f"images.example:{host.server_port}"
    parts = most = 0
    next_event = h11.Connection.next_event

    def count(connection: h11.Connection) -> Any:
        nonlocal parts
        parts += 1
        return next_event(connection)

    monkeypatch.setattr(h11.Connection, "next_event", count)

    async def others() -> None:
        nonlocal parts, most
        while True:
            most, parts = max(most, parts), 0
            await asyncio.sleep(0)

    async def main() -> None:
        beside = asyncio.ensure_future(others())
        with pytest.raises(ImageNotFetched):
            await fetcher(name).fetch(f"http://{name}/interim")
        beside.cancel()

    asyncio.run(main())
    assert most <= 3, "parts between two turns of other tasks"


def test_a_host_that_is_slow_or_away(host, connected) -> None:
    name = f"images.example:{host.server_port}"
    slow = fetcher(name, limits=BodyLimits(MAX, 0.3))
    assert "too long" in refused(slow, f"http://{name}/drip", ImageNotFetched)

    def unknown(_name: str) -> Any:
        raise OSError("no such host")

    assert "no address" in refused(fetcher(name, addresses=unknown), f"http://{name}/image", ImageNotFetched)
    away = fetcher(name, addresses=["1.1.1.1"])
    assert "cannot connect to the image host" in refused(away, f"http://{name}/image", ImageNotFetched)
    assert connected[-1] == "1.1.1.1"


def test_the_next_address_is_tried_when_one_does_not_answer(host, connected) -> None:
    name = f"images.example:{host.server_port}"
    assert fetch(fetcher(name, addresses=["1.1.1.1", PUBLIC]), f"http://{name}/image") == b"the image"
    assert connected == ["1.1.1.1", PUBLIC]


def test_fetches_are_bounded(host, connected) -> None:
    name = f"images.example:{host.server_port}"
    busy = fetcher(name, limits=BodyLimits(MAX, 5.0))

    async def scenario() -> None:
        running = [asyncio.ensure_future(busy.fetch(f"http://{name}/drip")) for _ in range(MAX_IMAGE_FETCHES)]
        await asyncio.sleep(0)
        with pytest.raises(ImageFetchesFull):
            await busy.fetch(f"http://{name}/image")
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert await busy.fetch(f"http://{name}/image") == b"the image"

    asyncio.run(scenario())


class Authority:
    """A certificate for one name, and a client that trusts it."""

    def __init__(self, folder: Path, name: str) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        chain = folder / "chain.pem"
        pem = serialization.Encoding.PEM
        plain = serialization.NoEncryption()
        chain.write_bytes(
            certificate.public_bytes(pem) + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
        )
        self.names: list[str | None] = []
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.load_cert_chain(chain)
        self.server.sni_callback = lambda _socket, asked, _context: self.names.append(asked)
        self.client = ssl.create_default_context(cadata=certificate.public_bytes(pem).decode())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "images.example")


@pytest.fixture
def tls_host(authority: Authority) -> Iterator[Any]:
    yield from serve(authority.server)


def test_tls_is_for_the_name_and_not_for_the_address(tls_host, authority: Authority, connected) -> None:
    port = tls_host.server_port
    hosts = (f"images.example:{port}", f"other.example:{port}")
    trusting = fetcher(*hosts, tls=lambda: authority.client)
    assert fetch(trusting, f"https://{hosts[0]}/image") == b"the image"
    assert authority.names == ["images.example"]
    assert tls_host.asked[0][1]["Host"] == hosts[0]
    # The certificate is for another name, or nobody vouches for it.
    refused(trusting, f"https://{hosts[1]}/image", ImageNotFetched)
    refused(fetcher(*hosts), f"https://{hosts[0]}/image", ImageNotFetched)
    assert len(tls_host.asked) == 1


def test_a_chat_completion_with_the_url_of_an_image(
    host, services: Services, image: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"localhost:{host.server_port}"
    host.answers = {**ANSWERS, "/image": lambda asked: asked.reply(200, image(8))}
    client = TestClient(create_app(services, BodyLimits(MAX, 10.0), HttpSettings(image_hosts=(name,))))
    part = {"type": "image_url", "image_url": {"url": f"http://{name}/image"}}
    chat = {"model": "fake", "messages": [{"role": "user", "content": [part]}]}
    refused = client.post("/v1/chat/completions", json=chat)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "image_url_refused")
    assert host.asked == []
    monkeypatch.setattr("snapcap.service.api.image_fetcher.is_public", lambda _address: True)
    for stream in (False, True):
        reply = client.post("/v1/chat/completions", json={**chat, "stream": stream})
        assert (reply.status_code, "8" in reply.text) == (200, True)
    part["image_url"]["url"] = f"http://{name}/missing"  # type: ignore[index]
    missing = client.post("/v1/chat/completions", json=chat)
    assert (missing.status_code, missing.json()["error"]["code"]) == (422, "image_not_fetched")


@pytest.mark.parametrize(("path", "member"), [("/v1/caption", "image"), ("/", "inputs")])
def test_a_caption_of_the_url_of_an_image(
    host, services: Services, image: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch, path: str, member: str
) -> None:
    name = f"localhost:{host.server_port}"
    host.answers = {**ANSWERS, "/image": lambda asked: asked.reply(200, image(8))}
    client = TestClient(create_app(services, BodyLimits(MAX, 10.0), HttpSettings(image_hosts=(name,))))
    refused = client.post(path, json={member: f"http://{name}/image"})
    assert (refused.status_code, "not at a public address" in refused.json()["error"]) == (422, True)
    assert host.asked == []
    monkeypatch.setattr("snapcap.service.api.image_fetcher.is_public", lambda _address: True)
    assert "8 7" in client.post(path, json={member: f" HTTP://{name}/image"}).text
    missing = client.post(path, json={member: f"http://{name}/missing"})
    assert (missing.status_code, "answered 404" in missing.json()["error"]) == (422, True)
    elsewhere = client.post(path, json={member: "https://images.example/image"}).json()["error"]
    assert "--allow-image-host" in elsewhere
    assert services.registry.get_sample_value("snapcap_requests_in_flight") == 0


def test_an_api_that_takes_no_url_names_those_that_do(client: TestClient) -> None:
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": ["https://images.example/image"]}
    refused = client.post("/v2/models/fake/infer", json={"inputs": [tensor]})
    assert "POST /v1/caption and POST /v1/chat/completions take URLs" in refused.json()["error"]
    refused = client.post("/v1/caption", files={"image": (None, b"https://images.example/image")})
    assert "a URL in JSON" in refused.json()["detail"]


def test_a_lookup_that_hangs_does_not_keep_a_server_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(60.0))

    async def begin_and_leave() -> None:
        looking = asyncio.ensure_future(Resolver()("images.example", 80))
        await asyncio.sleep(0.05)
        looking.cancel()

    server = threading.Thread(target=asyncio.run, args=(begin_and_leave(),))
    server.start()
    server.join(10.0)
    kept = server.is_alive()
    over.set()
    server.join()
    assert not kept
