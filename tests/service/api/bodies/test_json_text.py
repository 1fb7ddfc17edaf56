"""JSON with images in it: the same as the standard library reads, for less."""

import base64
import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from snapcap.service.api.bodies.base64_text import decode_base64
from snapcap.service.api.bodies.json_text import LONG, LongText, parse_json, whole_escapes
from snapcap.service.errors import InvalidJson, PayloadTooLarge

Png = Callable[..., bytes]
DATA = bytes(range(256)) * 1200
TEXT = base64.b64encode(DATA).decode()


def long_text(literal: str) -> str:
    """The string with this literal, of a document that is parsed."""
    return parse_json(b'{"a": "%b"}' % literal.encode())["a"]


def escaped(text: str, character: str, escape: str) -> str:
    return text.replace(character, escape)


WAYS = {
    "plain": TEXT,
    "data_uri": "data:image/png;base64," + TEXT,
    "upper_case": "DATA:image/png;BASE64," + TEXT,
    "slashes_of_php": "data:image\\/png;base64," + escaped(TEXT, "/", "\\/"),
    "plus_of_dotnet": escaped(TEXT, "+", "\\u002B"),
    "lines": "\\n".join(TEXT[at : at + 76] for at in range(0, len(TEXT), 76)),
    "windows_lines": "\\r\\n".join(TEXT[at : at + 64] for at in range(0, len(TEXT), 64)) + "\\r\\n",
    "spaces": " ".join(TEXT[at : at + 1000] for at in range(0, len(TEXT), 1000)) + " ",
    "all_escaped": "".join(f"\\u{ord(each):04x}" for each in TEXT),
}


@pytest.mark.parametrize("name", WAYS)
def test_long_base64_in_every_way_that_clients_write_it(name: str) -> None:
    text = long_text(WAYS[name])
    assert isinstance(text, LongText)
    assert decode_base64(text) == DATA
    whole = json.loads(f'"{WAYS[name]}"')
    assert decode_base64(whole) == DATA  # as a short one, on the other way
    assert whole.startswith(text)
    assert len(text) > 10_000


@pytest.mark.parametrize("extra", range(4))
def test_every_length(extra: int) -> None:
    data = DATA + b"x" * extra
    assert decode_base64(long_text(base64.b64encode(data).decode())) == data


@pytest.mark.parametrize(
    "text",
    [TEXT[:-1], TEXT + "====" + TEXT, TEXT[:300_000] + "=" + TEXT[300_000:], TEXT[:-1] + "!", TEXT + "é",
     "data:image/png," + TEXT, "data:;base64," * 2 + TEXT, TEXT + "\\ud800", TEXT + "\\u0000", "=" * 100_000],
)  # fmt: skip
def test_what_is_not_base64(text: str) -> None:
    assert decode_base64(long_text(text)) == b""
    assert decode_base64(json.loads(f'"{text}"')) == b""


@pytest.mark.parametrize(
    "tail", ["", "\\", "\\u", "\\u00e", "\\u00e9", "\\\\", "\\\\\\", "\\\\u00", "\\n", "\\\\n", "aaaaa\\"]
)
def test_an_escape_is_not_cut(tail: str) -> None:
    literal = b"x" * 10 + tail.encode()
    kept = whole_escapes(literal)
    json.loads(b'"%b"' % literal[:kept])
    assert len(literal) - kept < 6
    assert kept == len(literal) or literal[kept : kept + 1] == b"\\"


def test_long_strings_stay_where_they_are() -> None:
    long = "a" * (LONG + 1)
    document = {"b": [long, {"c": long, "d": "short"}, 1, None], "e": 'a "quoted" \\ text', "f": ""}
    read = parse_json(json.dumps(document).encode())
    assert read["b"][2:] == [1, None]
    assert (read["e"], read["f"], read["b"][1]["d"]) == (document["e"], "", "short")
    for text in (read["b"][0], read["b"][1]["c"]):
        assert isinstance(text, LongText)
        assert bytes(text.literal) == long.encode()
    assert isinstance(parse_json(json.dumps(long).encode()), LongText)


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize(
    "body",
    [
        "{",
        '{"a": "',
        '{"a": "\\',
        '{"a": "\\"',
        '["a" "b"]',
        '{"a": nan}',
        '{"a": NaN}',
        '{"a": "\n"}',
        '["\\x"]',
        "[1,]",
        '""""',
    ],
)
def test_what_is_not_json(body: str, size: int) -> None:
    with pytest.raises(InvalidJson):
        parse_json(body.encode() + b" " * size)


def test_only_utf_8_is_read() -> None:
    for codec in ("utf-16", "utf-32", "utf-16-le"):
        for long in ("a", "a" * 100_000):
            with pytest.raises(InvalidJson):
                parse_json(json.dumps({"a": long}).encode(codec))
    assert parse_json(b"\xef\xbb\xbf{}") == {}


MIB = 1 << 20
BOMBS = {
    "lists": b"[" + b"[]," * (6 * MIB) + b"[]]",
    "objects": b"[" + b"{}," * (6 * MIB) + b"{}]",
    "numbers": b"[" + b"0," * (10 * MIB) + b"0]",
    "strings": b"[" + b'"",' * (6 * MIB) + b'""]',
    "members": b"{" + b'"":0,' * (4 * MIB) + b'"":0}',
    "adjacent": b'"' * (20 * MIB),
    "quotes_within": b'["' + b'\\"' * (10 * MIB) + b'"]',
    "backslashes": b'["' + b"\\" * (20 * MIB) + b'"]',
    "spaces": b" " * (20 * MIB),
    "deep": b"[" * (20 * MIB),
    "digits": b"9" * (20 * MIB),
    "nearly_long": b"[" + b",".join([b'"%b"' % (b"\\u00e9" * 10_000)] * 300) + b"]",
    "long_escapes": b'{"image": "' + b"\\u00e9" * (3 * MIB) + b'"}',
    "long_base64": b'{"image": "' + base64.b64encode(bytes(15 * MIB)) + b'"}',
}


def worst_gap(work: Callable[[], Any]) -> float:
    """Seconds for which another thread could not run while some work was done."""
    done = threading.Event()
    gaps: list[float] = []

    def watch() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(gaps)


@pytest.fixture(scope="module")
def stall() -> float:
    """What the standard library's parser makes of one of them."""
    return worst_gap(lambda: json.loads(BOMBS["lists"]))


@pytest.mark.parametrize("name", BOMBS)
def test_no_document_keeps_other_threads_from_running(name: str, stall: float) -> None:
    def work() -> None:
        with contextlib.suppress(InvalidJson, PayloadTooLarge, TypeError):
            decode_base64(parse_json(BOMBS[name])["image"])

    assert min(worst_gap(work) for _ in range(3)) < stall / 4


def test_images_of_any_size_in_json(client: TestClient, image: Png) -> None:
    for size in ((8, 8), (400, 400)):
        data = image(5, size) + b"\0" * 100_000
        for uri in ("", "data:image/png;base64,", "DATA:image/png;base64,"):
            reply = client.post("/v1/caption", json={"image": uri + base64.b64encode(data).decode()})
            assert reply.json().get("caption") == "5 7", reply.text


def test_of_a_long_text_little_is_kept_as_characters() -> None:
    """A character of it may take four bytes, and they are not counted."""
    (text,) = parse_json(json.dumps(["\U0001f600" * LONG], ensure_ascii=False).encode())
    assert len(text) == 10_001
    assert len(text.literal) == 4 * LONG


def test_a_long_text_is_no_prompt(client: TestClient, image: Png) -> None:
    body = {"image": base64.b64encode(image()).decode(), "prompt": "a" * 100_000}
    reply = client.post("/v1/caption", json=body)
    assert (reply.status_code, reply.json()["code"]) == (422, "prompt_too_long")


def test_too_much_beside_the_images(client: TestClient, image: Png) -> None:
    body = {"image": base64.b64encode(image()).decode(), "a": [0] * 200_000}
    reply = client.post("/v1/caption", json=body)
    assert (reply.status_code, reply.json()["code"]) == (413, "payload_too_large")
