"""The text of a chat, ignored or continued, as `--chat-text` says."""

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.servers.live_app import create_app

from snapcap.models.errors import PromptError
from snapcap.service.api.app import Services
from snapcap.service.config.settings import HttpSettings
from snapcap.service.http.bodies import BodyLimits

PATH = "/v1/chat/completions"


def data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


@pytest.fixture
def tokenizer(services: Services) -> Any:
    """That of the model that is served."""
    model: Any = services.captioner._model
    return model.defaults.tokenizer(None)


@pytest.fixture
def ask(services: Services, image: Callable[..., bytes]) -> Callable[..., Any]:
    """``ask(text, chat_text, **fields)``: the reply to a chat of an image with this text."""
    url = data_uri(image(5))

    def post(text: str | list[str], chat_text: str = "ignore", **fields: Any) -> Any:
        texts = [{"type": "text", "text": each} for each in ([text] if isinstance(text, str) else text)]
        content = [*texts, {"type": "image_url", "image_url": {"url": url}}]
        client = TestClient(create_app(services, BodyLimits(1 << 20, 5.0), HttpSettings(chat_text=chat_text)))
        return client.post(
            PATH, json={"model": "fake", "messages": [{"role": "user", "content": content}], **fields}
        )

    return post


@pytest.mark.parametrize("stream", [False, True])
def test_text_is_ignored_and_said_to_be(ask: Callable[..., Any], engine, stream: bool) -> None:
    reply = ask("What's in this image?", stream=stream)
    assert reply.headers["x-snapcap-ignored"] == "text"
    assert engine.requests[-1].prompt_ids == ()
    assert "x-snapcap-ignored" not in ask(" \n", stream=stream).headers
    prompted = ask("What's in this image?", prompt="a red", stream=stream)
    assert (prompted.headers["x-snapcap-ignored"], engine.requests[-1].prompt_ids) == ("text", (1001, 1003))


@pytest.mark.parametrize("stream", [False, True])
def test_text_is_continued_where_that_is_asked_for(ask: Callable[..., Any], engine, stream: bool) -> None:
    reply = ask("a red", "continue", stream=stream)
    assert reply.status_code == 200
    assert "x-snapcap-ignored" not in reply.headers
    assert engine.requests[-1].prompt_ids == (1001, 1003)
    assert ask([], "continue", prompt="a", stream=stream).status_code == 200
    assert engine.requests[-1].prompt_ids == (1001,)


def test_what_could_be_continued_in_two_ways_is_refused(ask: Callable[..., Any]) -> None:
    for reply, param in (
        (ask("a", "continue", prompt="b"), "prompt"),
        (ask(["a", "b"], "continue"), "messages[0].content"),
        (ask("a" * 10_001, "continue"), None),
        (ask("a", "continue", messages=[{"role": "system", "content": "x"}]), "messages[0].role"),
        (ask("a", "continue", messages=[{"role": "user", "content": "x"}] * 2), "messages"),
    ):
        assert (reply.status_code, reply.json()["error"]["param"]) == (422, param)
    assert ask("a" * 100_000).status_code == 200


@pytest.mark.usefixtures("instructed")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat_text", ["ignore", "continue"])
def test_the_last_text_of_a_user_is_the_instruction_of_a_model_that_takes_one(
    ask: Callable[..., Any], engine, image: Callable[..., bytes], chat_text: str, stream: bool
) -> None:
    reply = ask(["What", " is it?"], chat_text, stream=stream)
    assert "x-snapcap-ignored" not in reply.headers
    assert engine.requests[-1].prompt_ids == (1004, 1002, 1003)
    parts = [
        {"type": "image_url", "image_url": {"url": data_uri(image(5))}},
        {"type": "text", "text": "Describe it."},
    ]
    conversation = [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "A dog."},
        {"role": "user", "content": "Its colour?"},
        {"role": "user", "content": " "},
    ]
    reply = ask("", chat_text, stream=stream, messages=conversation)
    assert reply.headers["x-snapcap-ignored"] == "replies, system, text"
    assert engine.requests[-1].prompt_ids == (1003, 1007)
    assert ask("", chat_text, stream=stream, prompt="a dog").status_code == 200
    assert engine.requests[-1].prompt_ids == (1001, 1003)
    refused = ask("a", chat_text, prompt="b")
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "prompt")


@pytest.mark.usefixtures("conversing")
@pytest.mark.parametrize("stream", [False, True])
def test_other_messages_reach_a_model_that_reads_conversations(
    ask: Callable[..., Any], engine, image: Callable[..., bytes], stream: bool
) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_uri(image(5))}}
    system = {"role": "system", "content": "Be terse."}
    shown = {"role": "user", "content": [picture, {"type": "text", "text": "Describe it."}]}
    reply = {"role": "assistant", "content": [{"type": "text", "text": "A dog."}]}
    asked = {"role": "user", "content": "Its colour?"}

    def sent(*messages: dict[str, Any]) -> tuple[str | None, tuple[int, ...], int]:
        got = ask("", stream=stream, messages=messages)
        assert got.status_code == 200
        request = engine.requests[-1]
        return got.headers.get("x-snapcap-ignored"), request.prompt_ids, request.ahead

    first = (1008, 1003)
    assert sent(shown) == (None, first, 0)
    assert sent(system, shown) == (None, (1002, 1006, *first), 2)
    assert sent(system, shown, reply, asked) == (None, (1002, 1006, *first, 1001, 1004, 1003, 1007), 2)
    assert sent(asked, reply, shown) == (None, (1003, 1007, 1001, 1004, *first), 4)
    assert sent(shown, reply, shown) == ("images", (*first, 1001, 1004, *first), 4)
    tool = {"role": "tool", "content": "42"}
    assert sent(shown, tool, system, asked) == ("replies, system", (*first, 1003, 1007), 0)
    refused = ask("", messages=[{**system, "content": "a " * 8}, shown])
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "prompt_too_long")
    message = refused.json()["error"]["message"]
    assert "before the image have 8 tokens with the template's; send at most 7" in message
    assert message.endswith("--text-tokens 9.")
    assert ask("", messages=[{**system, "content": "a " * 7}, shown]).status_code == 200
    long = {"role": "assistant", "content": "a" * 6000}
    refused = ask("", messages=[shown, long, {**asked, "content": "a" * 6000}])
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "prompt_too_long")


def sentences(reply: Any) -> list[str]:
    """Returns the warnings of a chat's reply, whole or streamed."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return reply.json().get("warnings", [])
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    return [sentence for chunk in chunks for sentence in chunk.get("warnings", [])]


@pytest.mark.usefixtures("conversing")
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_before_the_image_keeps_its_place_or_the_reply_says_that_it_does_not(
    ask: Callable[..., Any], engine, image: Callable[..., bytes], stream: bool
) -> None:
    def text(said: str) -> dict[str, str]:
        return {"type": "text", "text": said}

    picture, older = ({"type": "image_url", "image_url": {"url": data_uri(image(red))}} for red in (5, 6))
    system = {"role": "system", "content": "Be terse."}

    def sent(*parts: dict[str, Any], before: tuple[dict[str, Any], ...] = ()) -> tuple[list[str], Any, int]:
        reply = ask("", stream=stream, messages=[*before, {"role": "user", "content": parts}])
        assert reply.status_code == 200, reply.text
        request = engine.requests[-1]
        return sentences(reply), request.prompt_ids, request.ahead

    assert sent(text("Describe"), picture) == ([], (1008,), 1)
    assert sent(text("Describe"), picture, text("it now")) == ([], (1008, 1002, 1003), 1)
    assert sent(picture, text("it now")) == ([], (1002, 1003), 0)
    assert sent(text("Describe"), picture, before=(system,)) == ([], (1002, 1006, 1008), 3)
    ignored = "Ignored: images."
    assert sent(text("a"), older, text(" bb"), picture, text("ccc")) == ([ignored], (1001, 1002, 1003), 2)
    moved, ids, ahead = sent(text("a " * 6), picture, text("bb"), before=(system,))
    assert (ids, ahead) == ((1002, 1006, *[1001] * 6, 1002), 2)
    assert moved == [
        "The text before the image was read behind the image: a server with --text-tokens 9 reads the text in its "
        "place."
    ]
    long = ask("", stream=stream, messages=[{"role": "user", "content": [text("a" * 10_001), picture]}])
    assert long.json()["error"]["code"] == "prompt_too_long"


@pytest.mark.usefixtures("instructed")
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_reads_no_text_before_the_image_says_so(ask: Callable[..., Any], engine, stream: bool) -> None:
    reply = ask("What is it?", stream=stream)
    assert engine.requests[-1].prompt_ids == (1004, 1002, 1003)
    assert sentences(reply) == [
        "The text before the image was read behind the image: this model reads no text before the image."
    ]
    assert "x-snapcap-ignored" not in reply.headers


def test_a_text_that_the_model_cannot_take_is_refused(ask: Callable[..., Any], tokenizer: Any) -> None:
    def refuse(*_: object) -> None:
        raise PromptError("not begin with a space or a new line")

    tokenizer.prompt_ids = refuse
    refused = ask("a", prompt=" b")
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "prompt")
    assert "not begin with a space" in refused.json()["error"]["message"]


def test_the_document_says_which(services: Services, document: dict[str, Any]) -> None:
    def messages(described: dict[str, Any]) -> dict[str, Any]:
        body = described["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return body["properties"]["messages"]

    assert "contains" in messages(document)
    assert "X-Snapcap-Ignored" in document["paths"][PATH]["post"]["responses"]["200"]["headers"]
    app = create_app(services, BodyLimits(1, 1.0), HttpSettings(chat_text="continue"))
    assert messages(TestClient(app).get("/openapi.json").json())["maxItems"] == 1
