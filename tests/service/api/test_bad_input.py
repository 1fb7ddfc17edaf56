"""Each bad request gets a problem that says what to do, and the next good one is served."""

import base64
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

Png = Callable[..., bytes]


def problem_of(reply: Any, status: int, code: str) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    body = reply.json()
    assert body["status"] == status
    assert body["code"] == code
    assert body["type"] == f"urn:snapcap:problem:{code}"
    assert body["error"] == body["detail"]
    assert body["title"]
    assert body["detail"].endswith(".")
    assert body["request_id"] == reply.headers["x-request-id"]
    assert body["instance"] == reply.request.url.path
    return body


@pytest.fixture(autouse=True)
def serves_a_good_request_afterwards(client: TestClient, image: Png) -> Iterator[None]:
    yield
    assert client.post("/v1/caption", content=image(5)).json()["caption"] == "5 7"


def png_header(width: int, height: int) -> bytes:
    """A PNG of one scan line's data that claims any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + body


def test_empty_body(client: TestClient) -> None:
    problem_of(client.post("/v1/caption"), 400, "empty_body")
    problem_of(client.post("/v1/caption", headers={"Content-Type": "application/json"}), 400, "empty_body")


def test_not_an_image(client: TestClient) -> None:
    problem = problem_of(client.post("/v1/caption", content=b"hello"), 422, "unprocessable_image")
    assert problem["reason"] == "not_an_image"


def test_truncated_image(client: TestClient, image: Png) -> None:
    whole = image(1, (64, 64))
    problem = problem_of(client.post("/v1/caption", content=whole[:-40]), 422, "unprocessable_image")
    assert problem["reason"] == "truncated"


def test_image_without_area(client: TestClient) -> None:
    problem = problem_of(client.post("/v1/caption", content=png_header(0, 0)), 422, "unprocessable_image")
    assert problem["reason"] == "zero_size"


def test_decompression_bomb(client: TestClient) -> None:
    problem = problem_of(client.post("/v1/caption", content=png_header(10_000, 6_000)), 422, "unprocessable_image")
    assert problem["reason"] == "too_large"


def test_body_above_the_limit(client: TestClient) -> None:
    problem = problem_of(client.post("/v1/caption", content=b"x" * (100 << 20)), 413, "payload_too_large")
    assert "1048576 bytes" in problem["detail"]


def test_chunked_body_above_the_limit(client: TestClient) -> None:
    chunks = (b"x" * (1 << 20) for _ in range(100))
    problem_of(client.post("/v1/caption", content=chunks), 413, "payload_too_large")


@pytest.mark.parametrize(
    ("members", "code", "named"),
    [
        ({"max_new_tokens": "5"}, "invalid_option", "max_new_tokens"),
        ({"max_new_tokens": 5.5}, "invalid_option", "max_new_tokens"),
        ({"max_new_tokens": True}, "invalid_option", "max_new_tokens"),
        ({"max_new_tokens": 0}, "invalid_option", "max_new_tokens"),
        ({"max_new_tokens": 10**400}, "invalid_option", "max_new_tokens"),
        ({"max_new_tokens": 65}, "invalid_option", "max_new_tokens"),
        ({"temperature": [1]}, "invalid_option", "temperature"),
        ({"temperature": 10**400}, "invalid_option", "temperature"),
        ({"temperature": -0.1}, "invalid_option", "temperature"),
        ({"top_p": -0.1}, "invalid_option", "top_p"),
        ({"seed": 2**64}, "invalid_option", "seed"),
        ({"temperature": -1}, "invalid_option", "temperature"),
        ({"n": 2}, "unsupported_option", "n"),
        ({"images": ["a"]}, "unsupported_option", "images"),
        ({"timeout": 0}, "invalid_option", "timeout"),
        ({"prompt": 5}, "invalid_option", "prompt"),
        ({"prompt": "\ud800"}, "invalid_option", "prompt"),
        ({"beams": 4}, "unknown_option", "beams"),
    ],
)
def test_wrong_json_options(client: TestClient, image: Png, members: dict[str, Any], code: str, named: str) -> None:
    body = {"image": base64.b64encode(image()).decode(), **members}
    problem = problem_of(
        client.post("/v1/caption", content=json.dumps(body), headers={"Content-Type": "application/json"}),
        422,
        code,
    )
    assert problem["option"] == named
    assert named in problem["detail"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"\xff\xfe", 400, "invalid_json"),
        (b'{"image": NaN}', 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"image": ' + b"9" * 5000 + b"}", 400, "invalid_json"),
        (b'["image"]', 400, "invalid_json"),
        (b"{}", 422, "missing_image"),
        (b'{"image": null}', 422, "missing_image"),
        (b'{"image": 5}', 422, "unprocessable_image"),
        (b'{"image": "not base64!"}', 422, "unprocessable_image"),
        (b'{"image": "data:image/png,raw"}', 422, "unprocessable_image"),
        ('{"image": "é"}'.encode(), 422, "unprocessable_image"),
    ],
)
def test_wrong_json(client: TestClient, body: bytes, status: int, code: str) -> None:
    reply = client.post("/v1/caption", content=body, headers={"Content-Type": "application/json; charset=utf-8"})
    problem_of(reply, status, code)


@pytest.mark.parametrize(
    "query",
    ["top_k=x", "top_k=1.5", "top_k=1_0", "temperature=nan", "temperature=inf", "seed=1&seed=2", "seed=+"],
)
def test_wrong_query_options(client: TestClient, image: Png, query: str) -> None:
    problem = problem_of(client.post(f"/v1/caption?{query}", content=image()), 422, "invalid_option")
    assert problem["option"] == query.partition("=")[0]


@pytest.mark.parametrize(("wrong", "meant"), [("num-beams", "num_beams"), ("max_tokens", "max_new_tokens")])
def test_an_unknown_option_is_told_what_was_meant(client: TestClient, image: Png, wrong: str, meant: str) -> None:
    reply = client.post(f"/v1/caption?{wrong}=4", content=image())
    detail = problem_of(reply, 422, "unknown_option")["detail"]
    assert f"no option '{wrong}'; did you mean {meant}? The options are prompt, " in detail


@pytest.mark.parametrize("path", ["/v1/caption", "/v1/captions"])
def test_unknown_option_names_the_known_ones(client: TestClient, image: Png, path: str) -> None:
    files = {"image": ("a", image())}
    for reply in (
        client.post(f"{path}?promt=x", files=files),
        client.post(path, files=files, data={"promt": "x"}),
        client.post(path, files={**files, "promt": ("b", b"x")}),
    ):
        assert "max_new_tokens" in problem_of(reply, 422, "unknown_option")["detail"]


def test_too_many_images(client: TestClient, image: Png) -> None:
    files = [("image", (str(number), image())) for number in range(17)]
    assert "at most 16" in problem_of(client.post("/v1/captions", files=files), 422, "too_many_images")["detail"]
    assert (
        "/v1/captions" in problem_of(client.post("/v1/caption", files=files[:2]), 422, "too_many_images")["detail"]
    )


def test_more_parts_than_anyone_means(client: TestClient, image: Png) -> None:
    files = [("image", (str(number), image())) for number in range(100)]
    problem_of(client.post("/v1/captions", files=files), 400, "invalid_multipart")


def test_prompt_too_long(client: TestClient, image: Png) -> None:
    tokens = client.post("/v1/caption", files={"image": ("a", image())}, data={"prompt": "a " * 64})
    assert "at most 62 tokens" in problem_of(tokens, 422, "prompt_too_long")["detail"]
    characters = client.post("/v1/caption", files={"image": ("a", image())}, data={"prompt": "a" * 10_001})
    assert "at most 10000" in problem_of(characters, 422, "prompt_too_long")["detail"]


def test_multipart_without_a_file(client: TestClient) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=B"}
    field = b'--B\r\nContent-Disposition: form-data; name="image"\r\n\r\nx\r\n--B--\r\n'
    problem_of(client.post("/v1/caption", content=field, headers=form), 422, "missing_image")
    problem_of(client.post("/v1/caption", content=b"--B--\r\n", headers=form), 422, "missing_image")


@pytest.mark.parametrize("path", ["/v1/caption", "/v1/captions"])
def test_a_file_part_of_another_name_is_told_the_right_one(client: TestClient, image: Png, path: str) -> None:
    """As of `curl -F file=@x`, which most servers of files want."""
    for name in ("file", "f" * 500):
        problem = problem_of(client.post(path, files={name: ("x.png", image())}), 422, "missing_image")
        assert problem["detail"].startswith(f"The form has a file part named {name[:64]!r}, but none named image; ")
        assert "`curl -F image=@photo.jpg`" in problem["detail"]


def test_an_empty_file_part(client: TestClient) -> None:
    reply = client.post("/v1/caption", files={"image": ("a", b"")})
    assert problem_of(reply, 422, "unprocessable_image")["reason"] == "empty"


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=B", b"garbage"),
        ("multipart/form-data; boundary=B", b"--B\r\nContent-Disposition: form-data\r\n\r\nx\r\n--B--\r\n"),
        ("multipart/form-data; boundary=" + "B" * 5000, b"x"),
    ],
)
def test_broken_multipart(client: TestClient, content_type: str, body: bytes) -> None:
    reply = client.post("/v1/caption", content=body, headers={"Content-Type": content_type})
    problem_of(reply, 400, "invalid_multipart")


def test_unsupported_media_types(client: TestClient, image: Png) -> None:
    for kind in ("text/plain", "text/css", "video/mp4"):
        reply = client.post("/v1/caption", content=image(), headers={"Content-Type": kind})
        problem_of(reply, 415, "unsupported_media_type")
    problem_of(client.post("/v1/captions", content=image()), 415, "unsupported_media_type")


def test_paths_and_methods_that_do_not_exist(client: TestClient) -> None:
    problem_of(client.get("/v3"), 404, "not_found")
    problem_of(client.post("/v1/caption/"), 404, "not_found")
    reply = client.get("/v1/caption")
    problem_of(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
