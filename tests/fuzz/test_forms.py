"""Multipart bodies, mutated and in pieces of any size: each is read, or refused with an error of the client."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.attacks.fuzz_requests import AtOnce, read, request_of
from support.attacks.fuzzing import corpus, fuzzed
from support.attacks.mutations import mutated

from snapcap.service.api.caption import read_images
from snapcap.service.http.bodies import BodyLimits

LIMITS = BodyLimits(1 << 20, 5.0, pool=AtOnce())
SEEDS = corpus("forms")
MARKS = (
    *(b"--b", b"\r\n--b\r\n", b"\r\n--b--\r\n", b"\r\n", b"\r", b"\n", b":", b";", b'"', b"\\", b"\0", b"%00"),
    *(
        b"Content-Disposition: form-data; ",
        b'name="image"',
        b'filename="a"',
        b"filename*=utf-8''%ff",
        b"name*=",
        b"charset=",
    ),
    *(b"Content-Type: text/plain; charset=punycode\r\n", b"Content-Transfer-Encoding: base64\r\n", b"charset="),
)
TYPE = "multipart/form-data; boundary=b"


def form(body: bytes, content_type: str = TYPE, query: bytes = b"", piece: int = 1 << 16) -> int | None:
    """How many images were read."""
    request = request_of(body, content_type, query, piece)
    images = read(lambda: asyncio.run(read_images(request, LIMITS, 16)))
    return None if images is None else len(images[0])


def test_corpus() -> None:
    assert sum(form(body) is not None for body in SEEDS) >= 3


@fuzzed(600)
@given(mutated(SEEDS, MARKS), st.sampled_from((1, 2, 7, 64, 1 << 16)))
def test_mutated(body: bytes, piece: int) -> None:
    """How it is cut into pieces changes nothing."""
    assert form(body, piece=piece) == form(body)


CHARSETS = (
    "utf-8",
    "latin-1",
    "punycode",
    "idna",
    "undefined",
    "unicode_escape",
    "utf-7",
    "hex",
    "zlib",
    "rot13",
    "\xff",
)


@fuzzed(300)
@given(
    st.sampled_from(SEEDS),
    st.one_of(st.sampled_from(CHARSETS), st.text(st.characters(max_codepoint=255), max_size=20)),
    st.text(st.characters(max_codepoint=255), max_size=70),
)
def test_types(body: bytes, charset: str, boundary: str) -> None:
    form(body, f"multipart/form-data; boundary=b; charset={charset}")
    form(body, f"multipart/form-data; boundary={boundary}")


@fuzzed(400)
@given(st.binary(max_size=100))
def test_queries(query: bytes) -> None:
    """Of any bytes; some of them begin as an option does."""
    form(SEEDS[0], query=query)
    form(SEEDS[0], query=b"seed=" + query)


@pytest.mark.parametrize("count", [15, 16, 17, 64, 65])
def test_counts(count: int) -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\nx\r\n'
    assert form(part * count + b"--b--\r\n") == (count if count <= 16 else None)
