"""The messages of a chat as clients send them: the newest image counts, and members that nobody reads do not."""

import base64
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

Part = dict[str, Any]
PATH = "/v1/chat/completions"
TEXT = {"type": "text", "text": "What is it?"}
CALL = {"id": "1", "type": "function", "function": {"name": "screenshot", "arguments": "{}"}}


@pytest.fixture
def picture(image: Callable[..., bytes]) -> Callable[..., Part]:
    """``picture(5, **members)``: a content part whose caption is "5 7"."""

    def part(colour: int, **members: Any) -> Part:
        url = f"data:image/png;base64,{base64.b64encode(image(colour)).decode()}"
        return {"type": "image_url", "image_url": {"url": url}, **members}

    return part


@pytest.fixture
def ask(client: TestClient) -> Callable[..., Any]:
    """``ask(*messages, **fields)``: the reply."""

    def post(*messages: Any, **fields: Any) -> Any:
        return client.post(PATH, json={"model": "fake", "messages": messages, **fields})

    return post


def caption(reply: Any) -> str:
    assert reply.status_code == 200, reply.text
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


@pytest.mark.parametrize("role", ["tool", "function", "assistant", "system", "developer", "user"])
def test_the_newest_image_is_captioned_whoever_sent_it(ask, picture, role: str) -> None:
    older = {"role": "user", "content": [TEXT, picture(5)]}
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    newest = {"role": role, "content": [{"type": "text", "text": "here"}, picture(9)], "tool_call_id": "1"}
    asked = {"role": "user", "content": "And now?"}
    reply = ask(older, call, newest, asked)
    assert caption(reply) == "9 7"
    assert {"images", "replies", "text"} <= set(reply.headers["x-snapcap-ignored"].split(", "))
    assert caption(ask(newest)) == "9 7"
    assert caption(ask(newest, older)) == "5 7"
    (warning,) = reply.json()["warnings"]
    assert warning.startswith("Ignored: ")
    assert warning.endswith("This model takes no instructions or questions.")
    only = ask({"role": role, "content": [picture(9)]})
    assert (caption(only), "x-snapcap-ignored" in only.headers, "warnings" in only.json()) == ("9 7", False, False)


def test_of_several_images_in_a_message_the_last_is_captioned(ask, picture) -> None:
    reply = ask({"role": "user", "content": [picture(5), TEXT, picture(6), picture(9)]})
    assert (caption(reply), reply.headers["x-snapcap-ignored"]) == ("9 7", "images, text")
    assert reply.json()["warnings"][0].startswith("Ignored: images, text.")
    video = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}
    refused = ask({"role": "user", "content": [video, picture(9)]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "messages[0].content[0]")


@pytest.mark.parametrize("role", ["tool", "assistant", "user"])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa=="}},
        {"type": "image_file", "image_file": {"file_id": "x"}},
        {"type": "input_image", "file_id": "x"},
        {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}},
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": {"url": None}},
        {"type": "image_url", "image_url": {"url": "blob:http://localhost/1"}},
        {"type": "image_url", "image_url": {"uri": "data:image/png;base64,aa=="}},
    ],
)
def test_no_older_image_is_captioned_in_place_of_one_that_is_not_read(ask, picture, role: str, part: Part) -> None:
    older, newest = {"role": "user", "content": [picture(5)]}, {"role": role, "content": [TEXT, part]}
    refused = ask(older, newest)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_option")
    assert refused.json()["error"]["param"].startswith("messages[1].content[1]")
    assert caption(ask(newest, older)) == "5 7"


def test_images_beside_the_content_are_not_passed_over(ask, picture) -> None:
    reply = {"role": "assistant", "content": "here", "images": [picture(9)]}
    refused = ask({"role": "user", "content": [picture(5)]}, reply)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "messages[1].images")
    assert caption(ask(reply, {"role": "user", "content": [picture(5)], "images": []})) == "5 7"


def test_members_that_nobody_reads_are_ignored(ask, picture) -> None:
    cached = {"cache_control": {"type": "ephemeral"}, "uuid": "1", "annotations": [], "file": None, "text": None}
    part = picture(9, **cached)
    part["image_url"] |= {"detail": "original", "format": "image/png", "uuid": None, "width": 5}
    nulls = dict.fromkeys(("refusal", "tool_calls", "audio", "function_call", "name", "tool_call_id"))
    text = {**TEXT, "cache_control": {"type": "ephemeral"}, "annotations": [{}], "image_url": None}
    message = {"role": "user", "content": [text, part], **nulls}
    reply = ask(message)
    assert (caption(reply), reply.headers["x-snapcap-ignored"]) == ("9 7", "text")
    for name, value in {"name": 5, "annotations": [], "id": "x", "cache_control": {}, "audio": {"id": "1"}}.items():
        assert caption(ask({**message, name: value})) == "9 7"
    for detail in (None, "auto", "high", "original", "low-res", 5):
        part["image_url"]["detail"] = detail
        assert caption(ask(message)) == "9 7"


def test_other_spellings_of_parts(ask, picture) -> None:
    url = picture(9)["image_url"]["url"]
    for part in (
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_image", "image_url": {"url": url}},
    ):
        assert caption(ask({"role": "user", "content": [{"type": "input_text", "text": ""}, part]})) == "9 7"
    ambiguous = ask({"role": "user", "content": [picture(5), {**TEXT, "image_url": {"url": url}}]})
    assert (ambiguous.status_code, ambiguous.json()["error"]["param"]) == (422, "messages[0].content[1]")


def test_a_text_among_parts(ask, picture) -> None:
    """LangChain sends it so."""
    assert caption(ask({"role": "user", "content": ["What is it?", picture(9)]})) == "9 7"


def test_empty_contents(ask, picture) -> None:
    user = {"role": "user", "content": [picture(9)]}
    for content in ("", [], None):
        for role in ("system", "developer", "assistant", "tool", "function"):
            assert caption(ask({"role": role, "content": content}, user)) == "9 7"
    for message in ({"content": ""}, {"content": []}, {"content": None}, {}, {"content": [{**TEXT, "text": None}]}):
        assert caption(ask(user, {"role": "user", **message})) == "9 7"
    assert caption(ask(user, {"role": "assistant", "tool_calls": [CALL]})) == "9 7"
    assert caption(ask({"role": "assistant", "content": [{"type": "thinking", "thinking": "…"}, 5]}, user)) == "9 7"


def test_the_model_may_be_left_out_as_there_is_one(client: TestClient, picture) -> None:
    messages = [{"role": "user", "content": [picture(9)]}]
    for model in ({"model": "dummy"}, {"model": "tgi"}, {"model": ""}, {"model": None}, {}):
        reply = client.post(PATH, json={"messages": messages, **model})
        assert (caption(reply), reply.json()["model"]) == ("9 7", "fake")
    other = client.post(PATH, json={"messages": messages, "model": "dumm"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


def test_fields_of_a_chat(ask, picture, engine) -> None:
    user = {"role": "user", "content": [picture(9)]}
    tool = {"type": "function", "function": {"name": "f"}}
    for fields, ignored in (
        ({"tools": [tool], "tool_choice": "auto", "parallel_tool_calls": True}, "tools, parallel_tool_calls"),
        ({"tools": [tool], "tool_choice": "none", "functions": []}, "tools"),
        ({"user": "x", "metadata": {"a": "b"}, "modalities": ["text"], "response_format": {"type": "text"}}, ""),
        ({"stream_options": {"include_usage": True}}, ""),
        ({"stream_options": []}, ""),
        ({"stream_options": {"include_usage": None, "include_obfuscation": "x", "chunk_size": 5}}, ""),
        ({"stop": None, "tools": [], "logit_bias": {}, "functions": []}, ""),
        ({"stop": ""}, ""),
    ):
        reply = ask(user, **fields)
        assert (caption(reply), reply.headers.get("x-snapcap-ignored", "")) == ("9 7", ignored)
        assert reply.json().get("warnings") == ([f"Ignored: {ignored}."] if ignored else None)
    assert caption(ask(user, max_tokens=5, max_completion_tokens=-1, timeout=9)) == "9 7"
    assert engine.requests[-1].params.max_new_tokens == 5
    for field in ("max_tokens", "max_completion_tokens", "max_new_tokens"):
        assert caption(ask(user, **{field: 3})) == "9 7"
        assert engine.requests[-1].params.max_new_tokens == 3
    refused = ask(user, tools=[tool], tool_choice=tool)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "tool_choice")
