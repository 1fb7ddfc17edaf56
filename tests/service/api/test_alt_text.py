"""Captions for alt text in every API: shorter, and without what says that it is a picture."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.fakes.thread_decoder import PLAIN_CONFIG
from support.servers.good_requests import APIS, PATHS, good_request, options_of

from snapcap.models.text import PromptIds
from snapcap.service.api.app import Services

Png = Callable[..., bytes]
TEXT = "A picture of a dog that sits. It barks at a tree beside the house."
STYLE = {"max_chars": 20, "trim_lead": True}


class Writer:
    """Writes the same caption for any two tokens."""

    takes_instructions = takes_conversations = False

    def prompt_ids(self, text: str, *_: object) -> PromptIds:
        return PromptIds(tuple(range(len(text))))

    def caption(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> str:
        return TEXT if tokens else TEXT[: len(prompt_ids)]

    def stream(self, prompt_ids: Sequence[int]) -> SimpleNamespace:
        pieces = iter((TEXT[len(prompt_ids) : 40], TEXT[40:]))
        return SimpleNamespace(push=lambda _: next(pieces), end=lambda: "")


@pytest.fixture
def written(services: Services, client: TestClient) -> TestClient:
    """A client of a model that writes TEXT."""
    model: Any = services.captioner._model
    services.captioner._model = replace(model, defaults=type(model.defaults)(Writer(), PLAIN_CONFIG))
    return client


def said(api: str, reply: Any) -> str:
    assert reply.status_code == 200, reply.text
    body = reply.json()
    return {
        "caption": lambda: body["caption"],
        "huggingface": lambda: body[0]["generated_text"],
        "ollama": lambda: body["response"],
        "openai": lambda: body["choices"][0]["message"]["content"],
        "responses": lambda: body["output"][0]["content"][0]["text"],
        "v2": lambda: body["outputs"][0]["data"][0],
    }[api]()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("style", "text"),
    [
        ({}, TEXT),
        ({"trim_lead": True}, "A dog that sits. It barks at a tree beside the house."),
        ({"trim_lead": False, "max_chars": 30}, "A picture of a dog that sits."),
        (STYLE, "A dog that sits."),
        ({"max_chars": 16}, "A picture of a"),
        ({"max_chars": 66}, TEXT),
    ],
)
def test_every_api_shortens_a_caption_alike(
    written: TestClient, image: Png, api: str, style: dict[str, Any], text: str
) -> None:
    document = good_request(api, image(5))
    options_of(api, document).update(style)
    assert said(api, written.post(PATHS[api], json=document)) == text


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("wrong", [{"max_chars": 15}, {"max_chars": "20"}, {"trim_lead": 1}, {"trim_lead": "yes"}])
def test_other_values_are_refused(written: TestClient, image: Png, api: str, wrong: dict[str, Any]) -> None:
    document = good_request(api, image(5))
    options_of(api, document).update(wrong)
    reply = written.post(PATHS[api], json=document)
    assert (reply.status_code, f"'{next(iter(wrong))}' must be" in reply.text) == (422, True)


@pytest.mark.parametrize("api", ["openai", "responses", "ollama"])
def test_streams_too(written: TestClient, image: Png, api: str) -> None:
    document = {**good_request(api, image(5)), "stream": True}
    options_of(api, document).update(STYLE)
    reply = written.post(PATHS[api], json=document)
    data = [line.removeprefix("data: ") for line in reply.text.splitlines() if "{" in line]
    found = [json.loads(each) for each in data]
    texts = {
        "ollama": lambda each: each["response"],
        "openai": lambda each: each["choices"][0]["delta"].get("content", ""),
        "responses": lambda each: each.get("delta", ""),
    }[api]
    assert "".join(map(texts, found)) == "A dog that sits."


def test_queries_forms_and_events(written: TestClient, image: Png) -> None:
    query, files = "max_chars=20&trim_lead=TRUE", {"image": ("a.png", image(5))}
    assert written.post(f"/v1/caption?{query}", content=image(5)).json()["caption"] == "A dog that sits."
    form = {"max_chars": "20", "trim_lead": "true"}
    assert (
        written.post("/v1/captions", files=files, data=form).json()["captions"][0]["caption"] == "A dog that sits."
    )
    accept = {"Accept": "text/event-stream"}
    reply = written.post(f"/v1/caption?{query}", content=image(5), headers=accept)
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line]
    assert "".join(piece["text"] for piece in pieces) == last["caption"] == "A dog that sits."


def test_a_prompt_counts(written: TestClient, image: Png) -> None:
    """The caption that a reply holds, or continues, is what may be so long."""
    prompt = {"prompt": TEXT[:15], "max_chars": 30}
    whole = written.post("/v1/caption", params=prompt, content=image(5)).json()["caption"]
    assert whole == "A picture of a dog that sits."
    document = {**good_request("openai", image(5)), **prompt}
    assert said("openai", written.post(PATHS["openai"], json=document)) == whole[15:]
