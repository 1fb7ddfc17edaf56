"""OpenAI's Responses API: its events, its items, and what a response says of itself."""

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from snapcap.service.captioning.stream import CaptionStream
from snapcap.service.errors import EngineFailed

PATH = "/v1/responses"


@pytest.fixture
def picture(image: Callable[..., bytes]) -> Callable[[int], dict[str, Any]]:
    """``picture(5)``: a content part whose caption is "5 7"."""

    def part(colour: int) -> dict[str, Any]:
        url = f"data:image/png;base64,{base64.b64encode(image(colour)).decode()}"
        return {"type": "input_image", "image_url": url, "detail": "auto"}

    return part


@pytest.fixture
def ask(client: TestClient, picture) -> Callable[..., Any]:
    """``ask(*items, **fields)``: the reply; without items, to an image whose caption is "9 7"."""

    def post(*items: Any, **fields: Any) -> Any:
        given = list(items) or [{"role": "user", "content": [picture(9)]}]
        return client.post(PATH, json={"model": "fake", "input": given, **fields})

    return post


def text(reply: Any) -> str:
    assert reply.status_code == 200, reply.text
    (item,) = reply.json()["output"]
    (part,) = item["content"]
    return str(part["text"])


def events(reply: Any) -> list[tuple[str, dict[str, Any]]]:
    assert reply.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in reply.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_a_response(ask) -> None:
    reply = ask(max_output_tokens=20, temperature=0.5, seed=1)
    body = reply.json()
    assert (text(reply), body["status"], body["object"], body["model"]) == ("9 7", "completed", "response", "fake")
    assert (body["max_output_tokens"], body["temperature"], body["incomplete_details"]) == (20, 0.5, None)
    assert body["usage"]["output_tokens"] == body["usage"]["total_tokens"] == 2
    assert body["output"][0]["role"] == "assistant"
    assert "warnings" not in body


def test_the_events_of_a_response_in_their_order(ask) -> None:
    found = events(ask(stream=True))
    assert [name for name, _ in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [data["type"] for _, data in found] == [name for name, _ in found]
    assert [data["sequence_number"] for _, data in found] == list(range(10))
    assert "".join(data.get("delta", "") for _, data in found) == found[6][1]["text"] == "9 7"
    assert len({data["item_id"] for _, data in found if "item_id" in data}) == 1
    whole = ask().json()
    last = found[-1][1]["response"]
    apart = ("id", "created_at", "output")
    assert {name: last[name] for name in whole if name not in apart} == {
        name: whole[name] for name in whole if name not in apart
    }
    assert last["output"][0]["content"] == whole["output"][0]["content"]


def test_a_caption_that_was_cut_is_an_incomplete_response(ask, engine, monkeypatch: pytest.MonkeyPatch) -> None:
    take = CaptionStream._take

    def long(stream: CaptionStream, token: int | None) -> str:
        piece = take(stream, token)
        stream.finish_reason = stream.finish_reason and "length"
        return piece

    monkeypatch.setattr(CaptionStream, "_take", long)
    body = ask().json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    name, data = events(ask(stream=True))[-1]
    assert (name, data["response"]["status"]) == ("response.incomplete", "incomplete")


def test_an_error_after_the_first_event_fails_the_response(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    take = CaptionStream._take

    def fails(stream: CaptionStream, token: int | None) -> str:
        if stream.tokens:
            raise EngineFailed
        return take(stream, token)

    monkeypatch.setattr(CaptionStream, "_take", fails)
    name, data = events(ask(stream=True))[-1]
    assert (name, data["response"]["status"], data["response"]["output"]) == ("response.failed", "failed", [])
    assert data["response"]["error"]["code"] == "server_error"


def test_texts_and_fields_that_change_no_caption_are_ignored_and_named(ask, picture) -> None:
    items = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What?"}, picture(5)]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "5 7"}]},
    ]
    reply = ask(*items, instructions="Be brief.", store=True, text={"verbosity": "low"}, user="x", include=[])
    assert text(reply) == "5 7"
    assert set(reply.headers["x-snapcap-ignored"].split(", ")) == {
        *("replies", "system", "text", "instructions", "store", "verbosity")
    }
    (warning,) = reply.json()["warnings"]
    assert warning.endswith("This model takes no instructions or questions.")


def test_a_response_repeats_the_labels_of_its_request(ask, client: TestClient, picture) -> None:
    labels = {"album": "1", "photo": "é\n", "": ""}
    reply = ask(metadata=labels)
    assert (text(reply), reply.json()["metadata"]) == ("9 7", labels)
    for _, data in events(ask(metadata=labels, stream=True)):
        assert data.get("response", {}).get("metadata", labels) == labels
    others: tuple[Any, ...] = ("x", ["x"], {"a": 5}, {"a": "\ud800"}, {"a": "x" * 513}, {"x" * 513: ""})
    for wrong in (*others, dict.fromkeys("abcdefghijklmnopq", "")):
        asked = {"input": [{"role": "user", "content": [picture(9)]}], "metadata": wrong}
        assert client.post(PATH, content=json.dumps(asked)).json()["metadata"] == {}


def test_what_a_tool_returned_may_hold_the_newest_image(ask, picture) -> None:
    asked = {"role": "user", "content": [picture(5)]}
    output = {"type": "function_call_output", "call_id": "1", "output": [picture(9)]}
    assert text(ask(asked, output)) == "9 7"
    assert text(ask(output, asked)) == "5 7"
    assert text(ask({"type": None, "id": None, **asked})) == "5 7", "programs write members without a value as null"
    screen = {"type": "computer_screenshot", "image_url": picture(9)["image_url"]}
    assert text(ask(asked, {"type": "computer_call_output", "call_id": "1", "output": screen})) == "9 7"
    assert text(ask(asked, picture(9))) == "9 7", "a part beside the messages"
    made = ask(asked, {"type": "image_generation_call", "id": "1", "result": "aaaa"})
    assert (made.status_code, made.json()["error"]["param"]) == (422, "input[1].content[0]")
    unread = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "file_id": "x"}]}
    refused = ask(asked, unread)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "input[1].content[0].image_url")


def test_a_response_that_must_know_another_is_refused(ask) -> None:
    for field, value in {
        "previous_response_id": "resp_1",
        "conversation": {"id": "c"},
        "background": True,
        "tool_choice": "required",
        "top_logprobs": 2,
        "prompt": {"id": "pmpt_1"},
        "num_beam": 2,
    }.items():
        reply = ask(**{field: value})
        assert (reply.status_code, reply.json()["error"]["param"]) == (422, field)
    nothing = {"previous_response_id": None, "conversation": None, "background": False, "tool_choice": "auto"}
    assert text(ask(**nothing)) == "9 7"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("What is it?", "missing_image"),
        (None, "invalid_option"),
        ([], "invalid_option"),
        (5, "invalid_option"),
        (["a text"], "invalid_option"),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}], "invalid_option"),
    ],
)
def test_inputs_without_an_image(client: TestClient, given: Any, code: str) -> None:
    reply = client.post(PATH, json={"model": "fake", "input": given})
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, code)


@pytest.mark.usefixtures("instructed")
def test_instructions_are_for_models_that_take_them(ask, engine, picture) -> None:
    reply = ask(instructions="Write an alt text.")
    assert (reply.status_code, engine.requests[-1].prompt_ids) == (200, (1005, 1002, 1003, 1005))
    assert "x-snapcap-ignored" not in reply.headers
    both = [{"type": "input_text", "text": "What?"}, picture(9)]
    reply = ask({"role": "user", "content": both}, instructions="Be brief.")
    assert (engine.requests[-1].prompt_ids, reply.headers["x-snapcap-ignored"]) == ((1005,), "instructions")
