"""Options of beam search and of penalties in every API: what reaches the engine, and what is refused."""

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from snapcap.service.engine.request import Limits
from snapcap.warmup.runtime.slot_request import SamplingParams

Png = Callable[..., bytes]
LIMITED = Limits(cache_length=64, default_new_tokens=16, eos_ids=frozenset({1}), max_beams=6)

OPTIONS: dict[str, Any] = {
    "num_beams": 4,
    "length_penalty": 2.0,
    "early_stopping": "never",
    "no_repeat_ngram_size": 3,
    "repetition_penalty": 1.2,
}


def encoded(image: Png) -> str:
    return base64.b64encode(image(9)).decode()


def chat(image: Png, **options: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(image)}"}}
    return {"model": "fake", "messages": [{"role": "user", "content": [part]}], **options}


def post_query(client: TestClient, image: Png, options: dict[str, Any]) -> Any:
    return client.post("/v1/caption", params=options, content=image(9))


def post_json(client: TestClient, image: Png, options: dict[str, Any]) -> Any:
    return client.post("/v1/caption", json={"image": encoded(image), **options})


def post_form(client: TestClient, image: Png, options: dict[str, Any]) -> Any:
    return client.post("/v1/captions", files={"images": ("a.png", image(9), "image/png")}, data=options)


def post_huggingface(client: TestClient, image: Png, options: dict[str, Any]) -> Any:
    return client.post("/", json={"inputs": encoded(image), "parameters": options})


def post_kwargs(client: TestClient, image: Png, options: dict[str, Any]) -> Any:
    return client.post("/", json={"inputs": encoded(image), "parameters": {"generate_kwargs": options}})


def post_chat(client: TestClient, image: Png, options: dict[str, Any]) -> Any:
    return client.post("/v1/chat/completions", json=chat(image, **options))


def post_response(client: TestClient, image: Png, options: dict[str, Any]) -> Any:
    return client.post("/v1/responses", json={"input": chat(image)["messages"], **options})


def post_ollama(client: TestClient, image: Png, options: dict[str, Any]) -> Any:
    document = {"images": [encoded(image)], "stream": False, "options": options}
    return client.post("/api/generate", json=document)


def post_v2(client: TestClient, image: Png, options: dict[str, Any]) -> Any:
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [encoded(image)]}
    return client.post("/v2/models/fake/infer", json={"inputs": [tensor], "parameters": options})


APIS = (
    post_query,
    post_json,
    post_form,
    post_huggingface,
    post_kwargs,
    post_chat,
    post_response,
    post_ollama,
    post_v2,
)
every_api = pytest.mark.parametrize("post", APIS, ids=lambda post: post.__name__)


@every_api
def test_the_options_reach_the_engine(client: TestClient, image: Png, engine, post: Callable[..., Any]) -> None:
    assert post(client, image, OPTIONS).status_code == 200
    assert engine.requests[0].params == SamplingParams(**OPTIONS)


@every_api
def test_without_options_a_caption_is_greedy(
    client: TestClient, image: Png, engine, post: Callable[..., Any]
) -> None:
    assert post(client, image, {}).status_code == 200
    assert engine.requests[0].params == SamplingParams()


@every_api
@pytest.mark.parametrize(
    ("options", "named", "says"),
    [
        ({"num_beams": 9}, "num_beams", "a whole number from 1 to 8"),
        ({"num_beams": 0}, "num_beams", "a whole number from 1 to 8"),
        ({"num_beams": 7}, "num_beams", "at most 6, the rows of this server's largest bucket"),
        ({"num_beams": 2, "temperature": 0.5}, "num_beams", "does not sample"),
        ({"length_penalty": 11}, "length_penalty", "from -10 to 10"),
        ({"early_stopping": "sometimes"}, "early_stopping", "true, false or never"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size", "from 0 to 65536"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0 and at most 100"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(
    client: TestClient,
    image: Png,
    engine,
    post: Callable[..., Any],
    options: dict[str, Any],
    named: str,
    says: str,
) -> None:
    engine.limits = LIMITED
    reply = post(client, image, options)
    if post is post_form and "largest bucket" in says:  # an image of many fails alone
        assert reply.status_code == 200
    else:
        assert reply.status_code == 422
    assert says in reply.text
    assert named in reply.text
    assert engine.requests == []


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False), ("never", "never")])
def test_early_stopping_as_text(client: TestClient, image: Png, engine, text: str, value: object) -> None:
    assert post_query(client, image, {"num_beams": 2, "early_stopping": text}).status_code == 200
    assert engine.requests[0].params.early_stopping == value


@pytest.mark.parametrize("value", [1, 0, "true", [], 0.0])
def test_early_stopping_in_json_is_true_false_or_never(client: TestClient, image: Png, value: object) -> None:
    reply = post_json(client, image, {"early_stopping": value})
    assert (reply.status_code, reply.json()["option"]) == (422, "early_stopping")


def test_a_search_cannot_be_streamed(client: TestClient, image: Png, engine) -> None:
    reply = post_chat(client, image, {"num_beams": 2, "stream": True})
    assert reply.status_code == 422
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("num_beams", "invalid_option")
    assert "no token before its end" in error["message"]
    assert engine.requests == []


def test_a_stop_sequence_cuts_what_a_search_has_found(client: TestClient, image: Png, engine) -> None:
    reply = post_chat(client, image, {"num_beams": 2, "stop": " 7"})
    assert reply.status_code == 200
    assert engine.requests[0].on_token is None
    choice = reply.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("9", "stop")


def test_do_sample_and_beams_contradict_each_other(client: TestClient, image: Png, engine) -> None:
    assert post_huggingface(client, image, {"num_beams": 2, "do_sample": True}).status_code == 422
    assert post_huggingface(client, image, {"num_beams": 2, "do_sample": False}).status_code == 200
    assert engine.requests[0].params == SamplingParams(num_beams=2)


def test_the_document_describes_every_option(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    for name in OPTIONS:
        assert text.count(f'"{name}"') >= 5
