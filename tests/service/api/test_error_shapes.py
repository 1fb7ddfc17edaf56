"""Every way to fail, in every API: the status and the headers are the same, the shape is the API's own."""

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.servers.good_requests import APIS, PATHS, good_request, options_of

from snapcap.service.api.app import Services
from snapcap.service.errors import DeadlineExceeded
from snapcap.service.limits import QueueFull

Png = Callable[..., bytes]


def body(api: str, image: bytes) -> tuple[bytes, dict[str, str]]:
    return json.dumps(good_request(api, image)).encode(), {"Content-Type": "application/json"}


def post(client: TestClient, api: str, image: bytes) -> Any:
    content, headers = body(api, image)
    return client.post(PATHS[api], content=content, headers=headers)


def sentence(api: str, reply: Any) -> str:
    """The sentence in the error, after a look at the shape of it."""
    error = reply.json()
    assert reply.headers["x-request-id"]
    if api == "caption":
        assert reply.headers["content-type"] == "application/problem+json"
        assert error["status"] == reply.status_code
        assert error["detail"] == error["error"]
        return error["detail"]
    assert reply.headers["content-type"] == "application/json"
    assert list(error) == ["error"]
    if api not in ("openai", "responses"):
        return error["error"]
    assert list(error["error"]) == ["message", "type", "param", "code"]
    kinds = {429: "rate_limit_error"} | dict.fromkeys((500, 503, 504), "server_error")
    assert error["error"]["type"] == kinds.get(reply.status_code, "invalid_request_error")
    return error["error"]["message"]


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> str:
    return request.param


def test_good_requests_are_good(client: TestClient, services: Services, image: Png) -> None:
    replies = {api: post(client, api, image(9)).json() for api in APIS}
    assert replies["caption"]["caption"] == "9 7"
    assert replies["huggingface"] == [{"generated_text": "9 7"}]
    assert replies["ollama"]["response"] == "9 7"
    assert replies["openai"]["choices"][0]["message"]["content"] == "9 7"
    assert replies["responses"]["output"][0]["content"][0]["text"] == "9 7"
    assert replies["v2"]["outputs"][0]["data"] == ["9 7"]
    several = client.post("/v1/captions", files={"image": ("a.png", image(9))})
    assert several.json()["captions"][0]["caption"] == "9 7"
    for api in APIS:
        labels = {"api": api, "code": "200"}
        count = 2 if api == "caption" else 1
        assert services.registry.get_sample_value("snapcap_requests_total", labels) == count
        assert services.registry.get_sample_value("snapcap_request_duration_seconds_count", {"api": api}) == count


def test_not_ready(make_services, new_client, api: str, image: Png) -> None:
    services = make_services()
    with services.timeline.phase("load_weights"):
        reply = post(new_client(services), api, image())
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert "load_weights" in sentence(api, reply)


def test_overloaded(client: TestClient, engine, api: str, image: Png) -> None:
    engine.refuse = QueueFull(7.4)
    reply = post(client, api, image())
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")
    assert "queue is full" in sentence(api, reply)


def test_deadline(client: TestClient, engine, api: str, image: Png) -> None:
    engine.fail = DeadlineExceeded()
    reply = post(client, api, image())
    assert reply.status_code == 504
    assert "time limit" in sentence(api, reply)


def test_our_own_fault(client: TestClient, engine, api: str, image: Png) -> None:
    engine.fail = RuntimeError("secret")
    reply = post(client, api, image())
    assert reply.status_code == 500
    assert "its log has the cause" in sentence(api, reply)
    assert "secret" not in reply.text


def test_a_body_above_the_limit(client: TestClient, api: str) -> None:
    reply = client.post(PATHS[api], content=b"x" * (2 << 20), headers={"Content-Type": "application/json"})
    assert reply.status_code == 413
    assert "1048576 bytes" in sentence(api, reply)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000, b"NaN", b"[]", b""])
def test_bad_json(client: TestClient, api: str, content: bytes) -> None:
    reply = client.post(PATHS[api], content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert sentence(api, reply)


def test_a_compressed_body(client: TestClient, api: str, image: Png) -> None:
    content, headers = body(api, image())
    coded = {**headers, "Content-Encoding": "gzip"}
    assert client.post(PATHS[api], content=gzip.compress(content), headers=coded).status_code == 200
    assert client.post(PATHS[api], content=content, headers=coded).status_code == 400
    reply = client.post(PATHS[api], content=content, headers={**headers, "Content-Encoding": "br"})
    assert reply.status_code == 415
    assert "without Content-Encoding" in sentence(api, reply)


def test_an_unknown_option(client: TestClient, api: str, image: Png) -> None:
    content, headers = body(api, image())
    document = {**json.loads(content), "beams": 1}
    reply = client.post(PATHS[api], content=json.dumps(document), headers=headers)
    assert reply.status_code == 422
    assert "'beams'" in sentence(api, reply)


def test_an_image_that_is_none(client: TestClient, api: str) -> None:
    reply = post(client, api, b"no image")
    assert reply.status_code == 422
    assert sentence(api, reply)


def test_a_prompt_that_does_not_fit(client: TestClient, api: str, image: Png) -> None:
    content, headers = body(api, image())
    document, prompt = json.loads(content), "a " * 64
    options_of(api, document)["prompt"] = prompt
    reply = client.post(PATHS[api], content=json.dumps(document), headers=headers)
    assert reply.status_code == 422
    assert "at most 62 tokens" in sentence(api, reply)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_a_wrong_method(client: TestClient, api: str, method: str) -> None:
    reply = client.request(method, PATHS[api])
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert sentence(api, reply)


def test_a_wrong_method_at_the_root_names_those_of_both_apis(client: TestClient) -> None:
    assert client.put("/").headers["allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/caption/", "caption"),
        ("/nowhere", "caption"),
        ("/v1/models/other", "openai"),
        ("/v1/embeddings", "openai"),
        ("/api/embed", "ollama"),
        ("/v2/models/other", "v2"),
        ("/v2/models/fake/versions/2/ready", "v2"),
        ("/v2/nowhere", "v2"),
    ],
)
def test_what_is_not_there(client: TestClient, path: str, api: str) -> None:
    reply = client.get(path)
    assert reply.status_code == 404
    assert sentence(api, reply)


def test_a_model_that_is_not_served(client: TestClient, image: Png) -> None:
    reply = client.post("/models/org/other", content=image())
    assert reply.status_code == 404
    assert sentence("huggingface", reply) == "The model 'org/other' is not served here; use 'fake'."
