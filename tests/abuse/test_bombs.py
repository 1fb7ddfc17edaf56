"""Small bodies that would become large, or take long, where a parser believed them."""

import base64
import gzip
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from support.attacks.abuse import Abused

JSON = {"Content-Type": "application/json"}
CHATS = ("/v1/chat/completions", "/v1/responses", "/api/chat")
JSON_PATHS = ("/v1/caption", "/", *CHATS, "/api/generate", "/v2/models/demo/infer")
DEEP = 5_000


def nested(opening: str, closing: str, depth: int = DEEP, core: str = "1") -> bytes:
    return f"{opening * depth}{core}{closing * depth}".encode()


DOCUMENTS = {
    "deep_lists": nested("[", "]"),
    "deep_lists_open": b"[" * 500_000,
    "deep_objects": nested('{"image":', "}"),
    "deep_objects_open": b'{"image":' * 50_000,
    # As deep as the parser reads, so that whoever comes after it has to bear it.
    **{f"deep_{depth}": b'{"image": %s}' % nested("[", "]", depth) for depth in (490, 900, 980, 990, 995)},
    "huge_integer": b'{"image": "", "seed": 1%s}' % (b"0" * 100_000),
    "huge_integer_4300": b'{"image": "", "seed": 1%s}' % (b"0" * 4_298),
    "huge_exponent": b'{"image": "", "temperature": 1e999999999}',
    "long_fraction": b'{"image": "", "temperature": 0.%s}' % (b"1" * 200_000),
    "nan": b'{"image": "", "temperature": NaN, "top_p": Infinity, "length_penalty": -Infinity}',
    "many_members": json.dumps({f"a{number}": number for number in range(50_000)}).encode(),
    "same_member": b"{" + b'"seed": 1,' * 50_000 + b'"seed": 2}',
    "colliding_numbers": json.dumps({str(number * (2**61 - 1)): 0 for number in range(20_000)}).encode(),
    "long_name": b'{"%s": 1}' % (b"a" * 500_000),
    "many_escapes": b'{"prompt": "%s"}' % (b"\\u0041" * 80_000),
    "lone_surrogates": b'{"image": "", "prompt": "%s"}' % (b"\\ud800" * 1_000),
    "utf_16": '{"image": ""}'.encode("utf-16"),
    "utf_32": '{"image": ""}'.encode("utf-32"),
    "byte_order_mark": b"\xef\xbb\xbf{}",
    "bad_utf_8": b'{"image": "\xff\xfe\xc0\x80\xed\xa0\x80"}',
    "null_bytes": b"\0" * 100_000,
    "spaces": b" " * 500_000,
    "trailing": b"{}" + b" {}" * 1_000,
    "unterminated": b'{"image": "' + b"A" * 500_000,
    "base64_padding": b'{"image": "%s"}' % (b"=" * 500_000),
    "base64_of_nothing": b'{"image": "%s"}' % base64.b64encode(b"\0" * 300_000),
    "data_uri_commas": b'{"image": "data:%s"}' % (b"," * 100_000),
    "data_uri_parameters": b'{"image": "data:image/png%s,"}' % (b";a=b" * 100_000),
}


@pytest.mark.parametrize("path", JSON_PATHS)
def test_json(abused: Abused, path: str) -> None:
    def attack() -> None:
        for name, body in DOCUMENTS.items():
            status, reply, _ = abused.server.call(path, body, JSON)
            # A document without an image and a text asks Ollama's API to load the model.
            loads = path.startswith("/api/") and status == 200 and reply["done_reason"] == "load"
            assert loads or 400 <= status < 500, (name, status, reply)
            assert len(str(reply)) < 10_000, name

    abused.withstands(attack)


TENSOR = {"name": "image", "shape": [1] * 20_000, "datatype": "BYTES", "data": ["a"]}
PARTS = b"".join(
    b'--B\r\nContent-Disposition: form-data; name="u%d"\r\n%b\r\na\r\n'
    % (number, b"".join(b"h%d: a\r\n" % line for line in range(14)))
    for number in range(64)
)
DEAR = {
    "most messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 3_500}),
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 1_800}),
    "items": ("/v1/responses", {"input": [{"type": "reasoning", "output": []}] * 3_000}),
    "messages of Ollama": ("/api/chat", {"messages": [{"role": "user", "images": []}] * 3_000}),
    "dimensions": ("/v2/models/demo/infer", {"inputs": [TENSOR]}),
    "heads of parts": ("/v1/caption", PARTS + b"--B--"),
}


@pytest.mark.parametrize("name", DEAR)
def test_bodies_that_are_dear_to_parse_at_once(abused: Abused, name: str) -> None:
    """Eight connections send bodies within the bounds, of which some are small and each takes 10 ms or more."""
    path, content = DEAR[name]
    form = isinstance(content, bytes)
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    fields = {"Content-Type": "multipart/form-data; boundary=B"} if form else JSON

    def attack() -> None:
        with ThreadPoolExecutor(8) as clients:
            asked = [clients.submit(abused.server.call, path, body, fields) for _ in range(5 * 8)]
            assert {each.result()[0] for each in asked} == {422}

    abused.withstands(attack)


@cache
def compressed() -> dict[str, bytes]:
    """Bodies by their coding. Made in the tests: each worker collects all files."""
    bomb = bytes(50_000_000)
    once = gzip.compress(bomb)
    return {
        "gzip": once,
        "deflate": zlib.compress(bomb),
        "identity, gzip": once,
        "gzip, gzip": gzip.compress(once),
        "gzip, deflate": zlib.compress(gzip.compress(b"") * 1_000_000),
        "br": bomb[:1000],
        "zstd": bomb[:1000],
        "gzip, gzip, gzip": gzip.compress(gzip.compress(once)),
    }


def test_compressed_bodies(abused: Abused) -> None:
    """Of a bomb no more is unpacked than a body may have, and none of it on the event loop."""

    bodies = compressed()

    def attack() -> None:
        for path in ("/v1/caption", *CHATS, "/v2/models/demo/infer"):
            for coding, body in bodies.items():
                status, reply, _ = abused.server.call(path, body, {"Content-Encoding": coding})
                assert status in (400, 413, 415), (coding, status, reply)

    abused.withstands(attack)


def test_compressed_bodies_at_once(abused: Abused) -> None:
    body = compressed()["gzip"]

    def attack() -> None:
        with ThreadPoolExecutor(8) as clients:
            asked = [
                clients.submit(abused.server.call, "/v1/caption", body, {"Content-Encoding": "gzip"})
                for _ in range(3 * 8)
            ]
            assert {each.result()[0] for each in asked} <= {413, 429}

    damage = abused.withstands(attack)
    assert damage.window.peak < damage.before + (
        200 << 20
    )  # bodies of all requests together, and what they are made of


def part(name: str, content: bytes, *lines: str) -> bytes:
    head = "\r\n".join([f"Content-Disposition: form-data; {name}", *lines])
    return f"--b\r\n{head}\r\n\r\n".encode("utf-8", "surrogateescape") + content + b"\r\n"


END = b"--b--\r\n"
FILE = 'name="image"; filename="a.png"'
FORMS = {
    "empty": b"",
    "end_only": END,
    "no_name": part("", b"x") + END,
    "name_empty": part('name=""', b"x") + END,
    "name_long": part(f'name="{"a" * 100_000}"', b"x") + END,
    "name_unquoted": part("name=image", b"x") + END,
    "name_unterminated": part('name="image', b"x") + END,
    "name_null": part('name="ima\0ge"', b"x") + END,
    "name_bytes": part('name="\udcff\udcfe"', b"x") + END,
    "name_encoded": part("name*=utf-8''%ff%fe", b"x") + END,
    "name_twice": part('name="image"; name="prompt"', b"x") + END,
    "file_name_path": part('name="image"; filename="../../../../etc/passwd"', b"x") + END,
    "file_name_long": part(f'name="image"; filename="{"a" * 100_000}"', b"x") + END,
    "file_name_crlf": part('name="image"; filename="a%0d%0aSet-Cookie: b"', b"x") + END,
    "many_fields": part('name="seed"', b"1") * 5_000 + END,
    "many_files": part(FILE, b"x") * 5_000 + END,
    "many_lines": part(FILE, b"x", *(f"X-{number}: a" for number in range(5_000))) + END,
    "long_line": part(FILE, b"x", "X: " + "a" * 500_000) + END,
    "line_without_colon": part(FILE, b"x", "nothing") + END,
    "empty_part": part(FILE, b"") + END,
    "form_in_a_form": part(FILE, part(FILE, b"x") + END, "Content-Type: multipart/mixed; boundary=b") + END,
    "transfer_encoding": part(FILE, b"eA==", "Content-Transfer-Encoding: base64") + END,
    "boundaries_within": part(FILE, b"\r\n--" * 100_000) + END,
    "almost_boundaries": part(FILE, b"\r\n--a" * 100_000) + END,
    "carriage_returns": part(FILE, b"\r" * 300_000) + END,
    "after_the_end": END + b"x" * 300_000,
    "before_the_beginning": b"x" * 300_000 + part(FILE, b"x") + END,
    "charset_field": part('name="_charset_"', b"punycode") + part(FILE, b"x") + END,
}
BOUNDARIES = ("", "; boundary=", '; boundary=""', "; boundary=" + "a" * 5_000, "; boundary=a b")


def test_forms(abused: Abused) -> None:
    """Each is refused, as a whole or, of many images, each image of it."""

    def attack() -> None:
        for path in ("/v1/caption", "/v1/captions"):
            for name, body in FORMS.items():
                fields = {"Content-Type": "multipart/form-data; boundary=b"}
                status, reply, _ = abused.server.call(path, body, fields)
                items = reply.get("captions", [{"status": status}])
                assert all(400 <= item["status"] < 500 for item in items), (path, name, reply)
                assert len(str(reply)) < 20_000, name

    abused.withstands(attack)


def test_boundaries(abused: Abused) -> None:
    for boundary in BOUNDARIES:
        fields = {"Content-Type": f"multipart/form-data{boundary}"}
        status, reply, _ = abused.server.call("/v1/caption", part(FILE, b"x") + END, fields)
        assert 400 <= status < 500, (boundary[:30], status, reply)
