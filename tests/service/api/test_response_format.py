"""Answers that are a JSON object with the caption, in every API that may ask for one."""

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

Png = Callable[..., bytes]
Ask = Callable[[Any], Any]
OBJECT = {"type": "json_object"}


def schema(properties: Any, required: Any = None, **rules: Any) -> dict[str, Any]:
    listed = {} if required is None else {"required": required}
    return {"type": "object", "properties": properties, **listed, **rules}


TEXT = {"type": "string"}
# Schemas that a caption meets, with the member that holds it.
MET = [
    (schema({"caption": TEXT}, ["caption"]), "caption"),
    (schema({"alt_text": TEXT}, ["alt_text"], additionalProperties=False), "alt_text"),
    (schema({"description": {**TEXT, "title": "D", "description": "a text", "maxLength": 125}}), "description"),
    # As pydantic writes one, and with a member that may be left out.
    ({**schema({"a b": {**TEXT, "title": "A"}, "score": {"type": "number"}}, ["a b"]), "title": "T"}, "a b"),
    (schema({'é"\\': TEXT}, ['é"\\']), 'é"\\'),
]
UNMET = [
    schema({"tags": {"type": "array", "items": TEXT}}, ["tags"]),
    schema({"caption": TEXT, "title": TEXT}, ["caption", "title"]),
    schema({"caption": TEXT, "title": TEXT}),
    schema({"caption": {"type": "number"}}, ["caption"]),
    schema({"caption": {"type": ["string", "null"]}}, ["caption"]),
    schema({"caption": {"enum": ["a"]}}, ["caption"]),
    schema({"caption": {**TEXT, "enum": ["cat", "dog"]}}, ["caption"]),
    schema({"caption": {**TEXT, "pattern": "^a"}}, ["caption"]),
    schema({"caption": {**TEXT, "minLength": 900}}, ["caption"]),
    schema({"caption": TEXT}, ["other"]),
    schema({"caption": TEXT}, [["caption"]]),
    schema({"caption": TEXT}, "caption"),
    schema({"caption": TEXT}, ["caption"], minProperties=2),
    schema({"caption": TEXT}, ["caption"], anyOf=[{"required": ["x"]}]),
    schema({"c" * 65: TEXT}, ["c" * 65]),
    schema([], []),
    {"$ref": "#/$defs/A", "$defs": {"A": schema({"caption": TEXT}, ["caption"])}},
    {"type": "array", "items": TEXT},
    {"type": "string"},
]


def wrapped(api: str, form: dict[str, Any]) -> dict[str, Any]:
    """The fields that ask for `form`, which is of a chat."""
    inner = form.get("json_schema", {})
    if api == "chat":
        return {"response_format": form}
    if api == "responses":
        return {"text": {"format": {"type": form["type"], **inner}}}
    return {"format": inner["schema"] if inner else "json"}


@pytest.fixture(params=["chat", "responses", "ollama"])
def api(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ask(client: TestClient, api: str, image: Png) -> Callable[..., Any]:
    """``ask(form, **fields)``: the reply to a request for an answer of this form."""
    text = base64.b64encode(image(9)).decode()
    parts = [{"type": "input_image", "image_url": f"data:image/png;base64,{text}"}]
    messages = [{"role": "user", "content": parts}]

    def post(form: dict[str, Any], **fields: Any) -> Any:
        asked = {**wrapped(api, form), **fields}
        if api == "chat":
            return client.post("/v1/chat/completions", json={"messages": messages, **asked})
        if api == "responses":
            return client.post("/v1/responses", json={"input": messages, **asked})
        return client.post("/api/generate", json={"images": [text], "stream": False, **asked})

    return post


def by_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}


def answer(api: str, reply: Any) -> str:
    assert reply.status_code == 200, reply.text
    document = reply.json()
    if api == "chat":
        return document["choices"][0]["message"]["content"]
    return document["response"] if api == "ollama" else document["output"][0]["content"][0]["text"]


def pieces(api: str, reply: Any) -> list[str]:
    assert reply.status_code == 200, reply.text
    if api == "ollama":
        return [json.loads(line)["response"] for line in reply.text.splitlines()]
    data = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    if api == "chat":
        return [json.loads(each)["choices"][0]["delta"].get("content", "") for each in data]
    return [json.loads(each).get("delta", "") for each in data]


def test_an_object_has_the_caption(api: str, ask: Any) -> None:
    assert json.loads(answer(api, ask(OBJECT))) == {"caption": "9 7"}


@pytest.mark.parametrize(("wanted", "member"), MET, ids=lambda each: each if isinstance(each, str) else "")
def test_a_schema_of_one_text_is_met(api: str, ask: Any, wanted: dict[str, Any], member: str) -> None:
    assert json.loads(answer(api, ask(by_schema(wanted)))) == {member: "9 7"}
    streamed = pieces(api, ask(by_schema(wanted), stream=True))
    assert json.loads("".join(streamed)) == {member: "9 7"}
    whole = "maxLength" in str(wanted)  # a text that may be cut comes at its end
    assert len([piece for piece in streamed if piece]) == (3 if whole else 4)


@pytest.mark.parametrize("wanted", UNMET, ids=str)
def test_any_other_schema_is_refused_with_a_sentence(api: str, ask: Any, wanted: dict[str, Any]) -> None:
    reply = ask(by_schema(wanted))
    assert reply.status_code == 422
    assert "a caption cannot be constrained to a schema; ask for text, for json_object" in reply.text


@pytest.mark.parametrize("api", ["chat", "responses"])  # in Ollama's, the schema is the form itself
@pytest.mark.parametrize("kind", ["json_object", "json"])
@pytest.mark.parametrize("place", ["value", "schema"])
def test_a_schema_beside_the_type_of_any_object(ask: Any, api: str, kind: str, place: str) -> None:
    def asked(given: Any) -> Any:
        form = {"type": kind, place: given}
        return ask(OBJECT, **({"text": {"format": form}} if api == "responses" else {"response_format": form}))

    assert json.loads(answer(api, asked(schema({"alt_text": TEXT}, ["alt_text"])))) == {"alt_text": "9 7"}
    for nothing in (None, {}):
        assert json.loads(answer(api, asked(nothing))) == {"caption": "9 7"}
    assert asked(UNMET[0]).status_code == 422


def test_forms_that_are_none_of_these(api: str, ask: Any, client: TestClient) -> None:
    for form in ({"type": "text"}, {}):
        if api != "ollama":
            assert answer(api, ask({"type": "text", **form})) == "9 7"
    field = {"chat": "response_format", "responses": "text", "ollama": "format"}[api]
    by_number = {"type": "json_schema", "schema": 5}
    for form in ({"type": "json_schema"}, {"type": "regex"}, {"type": 5}, by_number, "xml"):
        value = {"format": form} if api == "responses" else form
        assert ask(OBJECT, **{field: value}).status_code == 422


def test_the_longest_text_of_a_schema_bounds_the_caption(api: str, ask: Any) -> None:
    wanted = schema({"alt": {**TEXT, "maxLength": 16}}, ["alt"])
    assert json.loads(answer(api, ask(by_schema(wanted)))) == {"alt": "9 7"}
    for most in (0, 15, "long", 1.5):
        reply = ask(by_schema(schema({"alt": {**TEXT, "maxLength": most}}, ["alt"])))
        assert (reply.status_code, "'maxLength' must be a whole number from 16" in reply.text) == (422, True)
