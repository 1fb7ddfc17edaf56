"""POST /v1/caption and /v1/captions, good requests."""

import base64
import json
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from starlette.testclient import TestClient

from snapcap.service.api.app import Services
from snapcap.service.errors import NotReady
from snapcap.service.limits import QueueFull

Png = Callable[..., bytes]


@pytest.mark.parametrize(
    "content_type", [None, "image/png", "application/octet-stream", "application/x-www-form-urlencoded"]
)
def test_raw_body(client: TestClient, image: Png, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    reply = client.post("/v1/caption", content=image(200), headers=headers)
    assert reply.status_code == 200
    body = reply.json()
    timings = body.pop("timings")
    assert body == {"caption": "200 7", "model": "fake", "tokens": 2, "finish_reason": "stop", "backend": "eager"}
    assert list(timings) == ["queue", "decode_image", "encode", "decode", "total"]
    assert (timings["encode"], timings["decode"]) == (2.0, 3.0)
    assert timings["total"] >= timings["decode_image"] >= 0


def test_multipart(client: TestClient, image: Png, engine) -> None:
    reply = client.post(
        "/v1/caption?top_k=3",
        files={"image": ("a.png", image(3), "image/png")},
        data={"prompt": "a red", "max_new_tokens": "5", "top_p": "0.5"},
    )
    assert reply.json()["caption"] == "1001 1003 3 7"
    params = engine.requests[0].params
    assert (params.max_new_tokens, params.top_k, params.top_p) == (5, 3, 0.5)
    assert engine.requests[0].prompt_ids == (1001, 1003)


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
def test_json(client: TestClient, image: Png, engine, prefix: str) -> None:
    text = prefix + base64.encodebytes(image(9)).decode()
    options = {"temperature": 1, "top_k": 5.0, "top_p": 1, "seed": 2**63 - 1, "prompt": None, "timeout": None}
    reply = client.post("/v1/caption?prompt=from+the+query&temperature=0.5", json={"image": text, **options})
    assert reply.json()["caption"] == "1004 1003 1005 9 7"
    params = engine.requests[0].params
    assert (params.temperature, params.top_k, params.seed, params.max_new_tokens) == (1.0, 5, 2**63 - 1, None)


def test_large_json_goes_through_the_pool(client: TestClient, image: Png) -> None:
    text = base64.b64encode(image(9)).decode() + " " * 100_000
    assert client.post("/v1/caption", json={"image": text}).json()["caption"] == "9 7"


def test_options_in_the_query_of_a_raw_body(client: TestClient, image: Png, engine) -> None:
    assert client.post("/v1/caption?max_new_tokens=4&seed=1&timeout=29.5", content=image()).status_code == 200
    assert engine.requests[0].params.max_new_tokens == 4
    assert engine.requests[0].params.seed == 1


def test_the_deadline_can_only_be_shortened(make_services, serve_with, new_client, image: Png, engine) -> None:
    client = new_client(serve_with(make_services(timeout=1000.0)))
    client.post("/v1/caption?timeout=2000", content=image())
    client.post("/v1/caption?timeout=100", content=image())
    client.post("/v1/caption", content=image())
    long, short, default = (request.deadline for request in engine.requests)
    assert short < long <= default


def test_several_images_keep_their_order(client: TestClient, image: Png) -> None:
    files = [("image", (f"{red}.png", image(red))) for red in (1, 2)] + [("images", ("3.png", image(3)))]
    reply = client.post("/v1/captions", files=files, data={"prompt": "so"})
    items = reply.json()["captions"]
    assert [item["index"] for item in items] == [0, 1, 2]
    assert [item["filename"] for item in items] == ["1.png", "2.png", "3.png"]
    assert [item["caption"] for item in items] == ["1002 1 7", "1002 2 7", "1002 3 7"]


def test_one_bad_image_does_not_fail_the_others(client: TestClient, image: Png) -> None:
    reply = client.post("/v1/captions", files=[("image", ("bad", b"no")), ("image", ("good", image(4)))])
    assert reply.status_code == 200
    bad, good = reply.json()["captions"]
    assert good["caption"] == "4 7"
    assert (bad["code"], bad["status"], bad["reason"]) == ("unprocessable_image", 422, "not_an_image")
    assert (bad["index"], bad["filename"]) == (0, "bad")
    assert bad["error"] == bad["detail"]


def test_sixteen_images_are_not_too_many(
    client: TestClient, make_services, serve_with, new_client, image: Png
) -> None:
    client = new_client(serve_with(make_services(queue_size=16)))
    reply = client.post("/v1/captions", files=[("image", (f"{i}", image(i))) for i in range(16)])
    assert [item["caption"] for item in reply.json()["captions"]] == [f"{i} 7" for i in range(16)]


def test_the_first_caption_is_marked(client: TestClient, services: Services, image: Png) -> None:
    assert "first_caption" not in services.timeline.marks()
    client.post("/v1/caption", content=image())
    first = services.timeline.marks()["first_caption"]
    client.post("/v1/caption", content=image())
    assert services.timeline.marks()["first_caption"] == first


STREAMED = {"Accept": "text/event-stream"}


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The data of each event."""
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line]


def test_a_caption_is_streamed_to_who_accepts_events(client: TestClient, image: Png) -> None:
    *pieces, last = events(client.post("/v1/caption?prompt=so", content=image(5), headers=STREAMED))
    whole = client.post("/v1/caption?prompt=so", content=image(5)).json()
    assert [list(piece) for piece in pieces] == [["text"]] * len(pieces)
    assert last["caption"].endswith("".join(piece["text"] for piece in pieces))
    assert len(pieces) == 2
    assert last.pop("timings").keys() == whole.pop("timings").keys()
    assert last == whole


@pytest.mark.parametrize(
    "accept",
    [
        "*/*",
        "application/json",
        "application/json, text/event-stream",
        "*/*, text/event-stream;q=0",
        "text/event-stream; q=0.0",
    ],
)
def test_who_accepts_json_gets_json(client: TestClient, image: Png, accept: str) -> None:
    assert client.post("/v1/caption", content=image(5), headers={"Accept": accept}).json()["caption"] == "5 7"


def test_a_stream_that_cannot_begin_has_the_status_of_its_error(client: TestClient, image: Png, engine) -> None:
    assert client.post("/v1/caption", content=b"no image", headers=STREAMED).json()["code"] == "unprocessable_image"
    beams = client.post("/v1/caption?num_beams=2", content=image(), headers=STREAMED)
    assert (beams.status_code, beams.json()["option"]) == (422, "num_beams")
    engine.refuse = QueueFull(9)
    assert client.post("/v1/caption", content=image(), headers=STREAMED).status_code == 429


def test_an_error_within_a_stream_is_its_last_event(services: Services, client: TestClient, image: Png) -> None:
    result, services.captioner.result = services.captioner.result, Mock(side_effect=NotReady("failed"))  # type: ignore[method-assign]
    first, *_, last = events(client.post("/v1/caption", content=image(5), headers=STREAMED))
    assert first == {"text": "5"}
    assert (last["status"], last["code"], last["instance"]) == (503, "not_ready", "/v1/caption")
    services.captioner.result = result  # type: ignore[method-assign]
    assert events(client.post("/v1/caption", content=image(5), headers=STREAMED))[-1]["caption"] == "5 7"
