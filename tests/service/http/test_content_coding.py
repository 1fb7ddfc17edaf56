"""Bodies with a Content-Encoding: read as what they were before, within the bounds of a body."""

import base64
import gzip
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from snapcap.service.errors import InvalidEncoding, PayloadTooLarge, UnsupportedEncoding
from snapcap.service.http import bodies
from snapcap.service.http.bodies import decompress

Png = Callable[..., bytes]
MAX_BODY = 1 << 20  # of the application that the tests have


def raw_deflate(data: bytes) -> bytes:
    return zlib.compress(data)[2:-4]


WAYS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZip": gzip.compress,
    "deflate": zlib.compress,
    "deflate ": raw_deflate,
    "identity": bytes,
    "utf-8": bytes,
    "none, gzip": gzip.compress,
    "identity, gzip": gzip.compress,
    " gzip ,identity,": gzip.compress,
    "gzip, gzip": lambda data: gzip.compress(gzip.compress(data)),
    "deflate, gzip": lambda data: gzip.compress(zlib.compress(data)),
    "gzip, deflate": lambda data: raw_deflate(gzip.compress(data)),
    "gzip,": lambda data: gzip.compress(data[:50]) + gzip.compress(b"") + gzip.compress(data[50:]),
}


def post(client: TestClient, body: bytes, coding: str, **headers: str) -> Any:
    return client.post("/v1/caption", content=body, headers={"Content-Encoding": coding, **headers})


@pytest.mark.parametrize("more", [0, 500_000], ids=["small", "large"])
@pytest.mark.parametrize("coding", WAYS)
def test_each_coding(client: TestClient, image: Png, coding: str, more: int) -> None:
    body = WAYS[coding](image(5) + bytes(more))
    assert post(client, body, coding).json().get("caption") == "5 7"


def test_fields_are_one_list(client: TestClient, image: Png) -> None:
    """Of several fields, as of one with commas."""
    fields = [("Content-Encoding", "deflate"), ("Content-Encoding", "gzip")]
    reply = client.post("/v1/caption", content=gzip.compress(zlib.compress(image(5))), headers=fields)
    assert reply.json()["caption"] == "5 7"


@pytest.mark.parametrize(("path", "kind"), [("/v1/captions", "form"), ("/", "json"), ("/v1/caption", "json")])
def test_forms_and_json(client: TestClient, image: Png, path: str, kind: str) -> None:
    files = {"image": ("a.png", image(5))}
    json = {"inputs" if path == "/" else "image": base64.b64encode(image(5)).decode()}
    body: dict[str, Any] = {"files": files} if kind == "form" else {"json": json}
    plain = client.build_request("POST", path, **body)
    headers = {"Content-Type": plain.headers["content-type"], "Content-Encoding": "gzip"}
    assert "5 7" in client.post(path, content=gzip.compress(plain.read()), headers=headers).text


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, br", "a" * 5000, "gzip, gzip, gzip", "\xff"])
def test_other_codings_are_told_which_are_read(client: TestClient, image: Png, coding: str) -> None:
    reply = client.post("/v1/caption", content=image(), headers=[(b"content-encoding", coding.encode("latin-1"))])
    assert (reply.status_code, reply.json()["code"]) == (415, "unsupported_media_type")
    assert reply.headers["accept-encoding"] == UnsupportedEncoding.READ == "gzip, deflate"
    assert len(reply.text) < 1000
    assert "accept-encoding" not in post(client, image(), "identity", **{"Content-Type": "text/css"}).headers


def test_what_is_not_what_it_says(client: TestClient, image: Png) -> None:
    packed = gzip.compress(image(5))
    bodies = {
        "gzip": [image(5), packed[:-1], packed[:9], packed[:1], packed + b"x", packed[:-8] + bytes(8),
                 zlib.compress(image(5)), packed + packed[:20]],
        "deflate": [image(5), packed, zlib.compress(image(5))[:-1], zlib.compress(image(5)) + b"x", b"\x78"],
        "gzip, gzip": [packed, gzip.compress(packed[:-1]), gzip.compress(b"")],
    }  # fmt: skip
    for coding, wrong in bodies.items():
        for number, body in enumerate(wrong):
            reply = post(client, body, coding)
            assert (reply.status_code, reply.json()["code"]) == (400, "invalid_encoding"), (coding, number)


def test_an_empty_body_stays_one(client: TestClient) -> None:
    for body in (b"", gzip.compress(b"")):
        assert post(client, body, "gzip").json()["code"] == "empty_body"


def test_bounds_are_of_what_comes_out(client: TestClient, image: Png) -> None:
    most = image(5) + bytes(MAX_BODY - len(image(5)))
    assert post(client, gzip.compress(most), "gzip").json()["caption"] == "5 7"
    for coding, body in (("gzip", most + b"\0"), ("gzip", bytes(50 << 20)), ("gzip, gzip", bytes(50 << 20))):
        reply = post(client, WAYS[coding](body), coding)
        assert (reply.status_code, reply.json()["limit"]) == (413, MAX_BODY)
        assert "decompressed body" in reply.json()["detail"]


def test_little_is_held_of_what_is_too_large() -> None:
    held: list[int] = []
    with pytest.raises(PayloadTooLarge):
        decompress(gzip.compress(bytes(50 << 20)), ["gzip"], 300_000, held.append)
    assert sum(held) <= 300_000
    assert max(held) <= 64 << 10


def test_refusals_of_the_account_come_through() -> None:
    def full(_: int) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        decompress(gzip.compress(b"a"), ["gzip"], 10, full)


def empty_blocks(count: int) -> bytes:
    """Compressed data of which each 11 bytes make the decoder build its tables, and stand for nothing."""
    order = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1)
    fields = [(0, 1), (2, 2), (0, 5), (0, 5), (14, 4), *((int(each in (1, 18)), 3) for each in order)]
    # 256 zeros, a code for the end of a block, one for a distance; and the end of this one.
    fields += [(1, 1), (127, 7), (1, 1), (107, 7), (0, 1), (0, 1), (0, 1)]
    number = size = 0
    for value, bits in fields * 8:
        number |= value << size
        size += bits
    return number.to_bytes(size // 8, "little") * (count // 8)


EXPENSIVE = {
    "empty_blocks": (empty_blocks(1 << 20), ["deflate"], PayloadTooLarge),
    "packed_empty_blocks": (gzip.compress(empty_blocks(1 << 20)), ["deflate", "gzip"], PayloadTooLarge),
    "members": (gzip.compress(b"") * 1001, ["gzip"], InvalidEncoding),
    "packed_members": (gzip.compress(gzip.compress(b"") * 1001), ["gzip", "gzip"], InvalidEncoding),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_what_stands_for_nothing_is_given_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many bytes it has: nothing comes out that could be counted."""
    monkeypatch.setattr(bodies, "DECOMPRESSION_CPU_S", 0.05)
    body, codings, error = EXPENSIVE[name]
    with pytest.raises(error):
        decompress(body, codings, 20 << 20, lambda _: None)
    assert decompress(gzip.compress(b""), ["gzip"], 1, lambda _: None) == b""
