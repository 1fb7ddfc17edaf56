"""JSON with images in it: the same as the standard library reads, for less."""

import base64
import contextlib
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
from starlette.testclient import TestClient

from snapcap.service.errors import InvalidJson, PayloadTooLarge
from snapcap.service.http.json_text import LONG, LongText, decode_base64, parse_json, whole_escapes

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
    "url_safe": TEXT.replace("+", "-").replace("/", "_"),
    "percent_encoded": TEXT.replace("+", "%2B").replace("/", "%2f"),
    "percent_encoded_lines": "%0D%0A".join(TEXT[at : at + 76] for at in range(0, len(TEXT), 76)),
    "whole_uri_percent_encoded": "data%3Aimage%2Fpng%3Bbase64%2C" + TEXT.replace("+", "%2B").replace("/", "%2F"),
    "all_percent_encoded": "".join(f"%{ord(letter):02x}" for letter in "data:image/png;base64," + TEXT),
    "space_before_base64": "data:image/png; base64, " + TEXT,
    "space_around": " \\n\\t data:image/png;base64," + TEXT + "\\n ",
    "lines_in_the_head": "DATA:image/png;\\r\\n BASE64,\\r\\n" + TEXT,
    "parameters": "data:image/png;charset=utf-8;name=" + "%C3%A9" * 500 + ".png;base64," + TEXT,
    "comma_in_a_parameter": 'data:image/png;name=\\"a,b.png\\";base64,' + TEXT,
    "comma_escaped": "data:image/png;base64\\u002c" + TEXT,
    "parameters_after_base64": "data:image/png;base64;charset=utf-8;name=a.png," + TEXT,
    "no_type": "data:;base64," + TEXT,
    "no_semicolon": "data:base64," + TEXT,
    "far_from_the_quote": " " * 300_000 + "data:image/png;base64," + TEXT,
    "more_padding": TEXT + "==",
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


@pytest.mark.parametrize("padding", ["", "=", "%3D", "\\u003d", "\\n="])
@pytest.mark.parametrize("extra", range(4))
def test_every_length_with_padding_and_without(extra: int, padding: str) -> None:
    data = DATA + b"x" * extra
    text = base64.b64encode(data).decode()
    written = text.rstrip("=") + padding * text.count("=")
    assert decode_base64(long_text(written)) == data
    assert decode_base64(json.loads(f'"{written}"')) == data


def test_an_escape_is_read_wherever_a_piece_ends() -> None:
    """Pieces end at 256 KiB, and an escape may lie across."""
    for before in range(4):
        text = TEXT[: (256 << 10) - before]
        at = len(text) - len(text) % 4
        literal = TEXT[:at] + "A" * (len(text) - at) + "%2B" + "A" * (-(len(text) + 1) % 4)
        assert decode_base64(long_text(literal)) == base64.b64decode(literal.replace("%2B", "+"))


@pytest.mark.parametrize(
    "text",
    [TEXT[:-3], TEXT + "%2", TEXT + "%41", TEXT + "====", TEXT + "%253D", TEXT + "====" + TEXT, TEXT[:-1] + "!",
     TEXT[:300_000] + "=" + TEXT[300_000:], TEXT + "é", "data:image/png;name=" + "a" * 9000 + ";base64," + TEXT,
     "data:;base64," * 2 + TEXT, TEXT + "\\ud800", TEXT + "\\u0000", "=" * 100_000],
)  # fmt: skip
def test_what_is_not_base64(text: str) -> None:
    assert decode_base64(long_text(text)) == b""
    assert decode_base64(json.loads(f'"{text}"')) == b""


@pytest.mark.parametrize(
    "head", ["data:image/png,", " DATA:,", "data:image/svg+xml;utf8,", "data:image/png;a=%2C,"]
)
@pytest.mark.parametrize("size", [1, 300_000])
def test_a_data_uri_without_base64(head: str, size: int) -> None:
    data = bytes(range(256)) * size
    written = head + "".join(f"%{byte:02x}" if byte != ord("a") else "a" for byte in data[: 4 * size])
    assert decode_base64(json.loads(f'"{written}"')) == data[: 4 * size]
    if size > 1:
        assert decode_base64(long_text(written)) == data[: 4 * size]


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


@pytest.mark.parametrize("more", [0, 100_000])
def test_an_image_that_is_called_json_is_told_its_type(more: int) -> None:
    for head, name in ((b"\xff\xd8\xff\xe0", "JPEG"), (b"\x89PNG\r\n\x1a\n", "PNG"), (b"\xff\x0a", "JPEG XL")):
        with pytest.raises(InvalidJson, match=rf"not JSON, but an image \({name}\); send it with the Content-Type"):
            parse_json(head + bytes(more + 9))
    with pytest.raises(InvalidJson, match="plain numbers"):
        parse_json(b"\xff{}")


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
            with pytest.raises(InvalidJson, match="in UTF-8"):
                parse_json(json.dumps({"a": long}).encode(codec))
    assert parse_json(b"\xef\xbb\xbf{}") == {}


MIB = 1 << 20
# Made in the tests: each worker collects all files, and keeps what they hold.
BOMBS: dict[str, Callable[[], bytes]] = {
    "lists": lambda: b"[" + b"[]," * (6 * MIB) + b"[]]",
    "objects": lambda: b"[" + b"{}," * (6 * MIB) + b"{}]",
    "numbers": lambda: b"[" + b"0," * (10 * MIB) + b"0]",
    "strings": lambda: b"[" + b'"",' * (6 * MIB) + b'""]',
    "members": lambda: b"{" + b'"":0,' * (4 * MIB) + b'"":0}',
    "adjacent": lambda: b'"' * (20 * MIB),
    "quotes_within": lambda: b'["' + b'\\"' * (10 * MIB) + b'"]',
    "backslashes": lambda: b'["' + b"\\" * (20 * MIB) + b'"]',
    "spaces": lambda: b" " * (20 * MIB),
    "deep": lambda: b"[" * (20 * MIB),
    "digits": lambda: b"9" * (20 * MIB),
    "nearly_long": lambda: b"[" + b",".join([b'"%b"' % (b"\\u00e9" * 10_000)] * 300) + b"]",
    "long_escapes": lambda: b'{"image": "' + b"\\u00e9" * (3 * MIB) + b'"}',
    "long_base64": lambda: b'{"image": "' + base64.b64encode(bytes(15 * MIB)) + b'"}',
}


def worst_gap(work: Callable[[], Any]) -> float:
    """CPU seconds of this process during which another thread could not run while some work was done. Other
    processes may take the CPUs for any time."""
    done = threading.Event()
    gaps: list[float] = []

    def watch() -> None:
        last = time.process_time()
        while not done.is_set():
            time.sleep(0.001)
            now = time.process_time()
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
    lists = BOMBS["lists"]()
    return worst_gap(lambda: json.loads(lists))


@pytest.mark.parametrize("name", BOMBS)
def test_no_document_keeps_other_threads_from_running(name: str, stall: float) -> None:
    document = BOMBS[name]()

    def work() -> None:
        with contextlib.suppress(InvalidJson, PayloadTooLarge, TypeError):
            decode_base64(parse_json(document)["image"])

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


def in_every_api(text: str) -> dict[str, dict[str, Any]]:
    """Requests with an image that is this text, by their paths."""
    parts = [{"type": "image_url", "image_url": {"url": text}}]
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [text]}
    return {
        "/v1/caption": {"image": text},
        "/": {"inputs": text},
        "/v1/chat/completions": {"model": "fake", "messages": [{"role": "user", "content": parts}]},
        "/v1/responses": {"model": "fake", "input": [{"role": "user", "content": parts}]},
        "/api/generate": {"images": [text], "stream": False},
        "/api/chat": {"messages": [{"role": "user", "images": [text]}], "stream": False},
        "/v2/models/fake/infer": {"inputs": [tensor]},
    }


@pytest.mark.parametrize("path", in_every_api(""))
@pytest.mark.parametrize(
    "way", ["\n DATA:image/png;name=a.png; BASE64,\r\n{}\n", " data%3Aimage/png%3Bbase64%2C{}"]
)
def test_a_data_uri_is_read_alike_in_every_api(client: TestClient, image: Png, path: str, way: str) -> None:
    written = base64.urlsafe_b64encode(image(5) + b"\xff\xfe").decode().rstrip("=")
    reply = client.post(path, json=in_every_api(way.format(written))[path])
    assert reply.status_code == 200, reply.text
    assert "5 7" in reply.text


@pytest.mark.parametrize("path", ["/v1/caption", "/", "/v1/chat/completions", "/v1/responses", "/api/chat"])
@pytest.mark.parametrize(
    "kind",
    [
        *(None, "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "application/vnd.a+json"),
        *("*/*", "application/x-json", "application/x-octet-stream"),
    ],
)
@pytest.mark.parametrize("size", [0, 100_000])
def test_json_of_a_type_that_says_nothing(
    client: TestClient, image: Png, path: str, kind: str | None, size: int
) -> None:
    """As a browser's `fetch` of a text and `curl --data` send it."""
    text = "data:image/png;base64," + base64.b64encode(image(5) + bytes(size)).decode()
    body = b"\xef\xbb\xbf\r\n \t" + json.dumps(in_every_api(text)[path]).encode()
    reply = client.post(path, content=body, headers={"Content-Type": kind} if kind else {})
    assert reply.status_code == 200, reply.text
    assert "5 7" in reply.text


@pytest.mark.parametrize("path", ["/v1/caption", "/"])
def test_other_text_is_told_what_is_read(client: TestClient, image: Png, path: str) -> None:
    for body in (b"photo.jpg", image(5), b" " * 2_000 + b"{}"):
        reply = client.post(path, content=body, headers={"Content-Type": "text/plain"})
        assert reply.status_code == 415, reply.text
        assert "text/plain is not read; send an image" in reply.text


def test_percent_encoded_characters_are_decoded_as_the_standard_library_does() -> None:
    draw = random.Random(5)
    parts = ("%", "%4", "%41", "%zz", "=", "%3D", "%3d", "A", "_", "\r\n", "\n", " ", "%0A", "%ff", "%25", ".")
    for _ in range(5000):
        text = "".join(draw.choices(parts, k=draw.randrange(12)))
        assert decode_base64(f"data:image/png,{text}") == unquote_to_bytes(text), text


def test_percent_encoded_base64_takes_no_second_of_a_thread_of_bodies() -> None:
    """The threads are two, and 20 MiB of it are 18 KiB when they are compressed."""
    text = b"%41" * 2_000_000
    began = time.thread_time()
    unquote_to_bytes(text)
    allowed = 0.6 * (time.thread_time() - began)
    began = time.thread_time()
    assert len(decode_base64(text)) == 1_500_000
    assert time.thread_time() - began < allowed
    assert decode_base64(b"%" * 1_000_000) == b""
