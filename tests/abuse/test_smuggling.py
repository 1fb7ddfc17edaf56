"""Requests whose end two parties may see at different places: none is read as two, and none stops the server."""

import pytest
from support.attacks.abuse import Abused
from support.servers.raw_http import exchange, statuses

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"


def head(*lines: str) -> bytes:
    return "\r\n".join(["POST /v1/caption HTTP/1.1", "Host: a", *lines, "", ""]).encode("latin-1")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


END = b"0\r\n\r\n"
CHUNKED = "Transfer-Encoding: chunked"
# What RFC 9112 calls an attack or an error of framing: refused, and nothing after it is read as a request.
REFUSED = {
    "both_lengths": head("Content-Length: 6", CHUNKED) + END + HIDDEN,
    "both_lengths_swapped": head(CHUNKED, "Content-Length: 6") + END + HIDDEN,
    "two_lengths": head("Content-Length: 0", f"Content-Length: {len(HIDDEN)}") + HIDDEN,
    "length_list": head("Content-Length: 0, 34") + HIDDEN,
    "length_negative": head("Content-Length: -1") + HIDDEN,
    "length_hex": head("Content-Length: 0x0") + HIDDEN,
    "length_huge": head("Content-Length: 18446744073709551616") + HIDDEN,
    "length_exponent": head("Content-Length: 1e1") + HIDDEN,
    "space_before_colon": head("Content-Length : 0") + HIDDEN,
    "unknown_coding": head("Transfer-Encoding: xchunked") + END + HIDDEN,
    "chunked_not_last": head("Transfer-Encoding: chunked, identity") + END + HIDDEN,
    "chunked_in_quotes": head('Transfer-Encoding: "chunked"') + END + HIDDEN,
    "chunk_size_negative": head(CHUNKED) + b"-1\r\n\r\n" + HIDDEN,
    "chunk_size_hex_prefix": head(CHUNKED) + b"0x0\r\n\r\n" + HIDDEN,
    "chunk_size_huge": head(CHUNKED) + b"fffffffffffffffff\r\n\r\n" + HIDDEN,
    "chunk_size_empty": head(CHUNKED) + b"\r\n\r\n" + HIDDEN,
    "chunk_too_long": head(CHUNKED) + b"1\r\nab\r\n" + END + HIDDEN,
    "chunk_bare_lf": head(CHUNKED) + b"0\n\n" + HIDDEN,
    "bare_cr_in_field": head("X: a\rContent-Length: 34") + HIDDEN,
    "null_in_field": head("X: a\0b") + HIDDEN,
    "field_without_name": head(": a") + HIDDEN,
    "folded_length": head("Content-Length:", " 0") + b"\0" + HIDDEN,
    "tab_in_method": b"POST\t/v1/caption HTTP/1.1\r\nHost: a\r\n\r\n" + HIDDEN,
    "version_unknown": b"POST /v1/caption HTTP/9.9\r\nHost: a\r\n\r\n" + HIDDEN,
    "not_http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 512 + HIDDEN,
    "http2_preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 9 + HIDDEN,
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_answer(abused: Abused, name: str) -> None:
    """It is an error, and what was hidden behind is not answered."""
    (status,) = statuses(exchange(abused.port, REFUSED[name]))
    assert 400 <= status <= 501
    assert status != 500


def test_all_of_them(abused: Abused) -> None:
    def attack() -> None:
        for data in [*REFUSED.values()] * 20:
            exchange(abused.port, data)

    abused.withstands(attack)
