"""The `openai` package against a real server."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def data_uri(image: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}"


def messages(image: Path | str, text: str | None = None) -> list[Any]:
    url = image if isinstance(image, str) else data_uri(image)
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}}]
    if text is not None:
        parts.insert(0, {"type": "text", "text": text})
    return [{"role": "user", "content": parts}]


def test_models(client: OpenAI, model: str) -> None:
    (listed,) = client.models.list()
    assert (listed.id, listed.object, listed.owned_by) == (model, "model", "snapcap")
    assert client.models.retrieve(model) == listed
    with pytest.raises(openai.NotFoundError) as failed:
        client.models.retrieve("gpt-4o")
    assert (failed.value.code, failed.value.param, failed.value.type) == (
        "model_not_found",
        "model",
        "invalid_request_error",
    )


def test_every_sample_whole_and_streamed(client: OpenAI, model: str, samples: dict[Path, str]) -> None:
    for image, caption in samples.items():
        whole = client.chat.completions.create(model=model, messages=messages(image))
        (choice,) = whole.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", caption, "stop")
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 0
        assert whole.usage.completion_tokens == whole.usage.total_tokens > 3
        stream = client.chat.completions.create(model=model, messages=messages(image), stream=True)
        chunks = list(stream)
        assert len({chunk.id for chunk in chunks}) == 1
        assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
        assert chunks[0].choices[0].delta.role == "assistant"
        contents = [chunk.choices[0].delta.content for chunk in chunks[1:-1]]
        assert "".join(contents) == caption  # type: ignore[arg-type]
        assert len(contents) == whole.usage.completion_tokens  # a chunk a token: the demo model's are whole words
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert chunks[-1].choices[0].delta.content is None


def test_usage_of_a_stream_comes_last_and_only_when_asked_for(
    client: OpenAI, model: str, sample: tuple[Path, str]
) -> None:
    request: dict[str, Any] = {"model": model, "messages": messages(sample[0]), "stream": True}
    request["extra_body"] = {"prompt": "a"}
    assert all(chunk.usage is None for chunk in client.chat.completions.create(**request))
    *chunks, last = client.chat.completions.create(**request, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.prompt_tokens == 1
    assert last.usage.total_tokens == 1 + last.usage.completion_tokens


def test_a_prompt_is_continued(client: OpenAI, model: str, sample: tuple[Path, str]) -> None:
    image, caption = sample
    first, rest = caption.split()[0], caption.removeprefix(caption.split()[0])
    request: dict[str, Any] = {"model": model, "messages": messages(image), "extra_body": {"prompt": first}}
    assert client.chat.completions.create(**request).choices[0].message.content == rest
    stream = client.chat.completions.create(**request, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == rest


@pytest.mark.parametrize("stream", [False, True])
def test_stop_within_and_across_tokens(client: OpenAI, model: str, sample: tuple[Path, str], stream: bool) -> None:
    image, caption = sample
    words = caption.split()
    # It begins in the middle of the third word and ends in the middle of the fourth.
    across = f"{words[2][-2:]} {words[3][:2]}"
    before = caption[: caption.index(across)]
    for stop in (across, ["nowhere", across, words[-1]]):
        text, reason = ask(client, stream, model=model, messages=messages(image), stop=stop)
        assert (text, reason) == (before, "stop")
    text, reason = ask(client, stream, model=model, messages=messages(image), stop=["nowhere", caption + "!"])
    assert (text, reason) == (caption, "stop")


def ask(client: OpenAI, stream: bool, **request: Any) -> tuple[str, str]:
    """The text and how it ended."""
    reply = client.chat.completions.create(**request, stream=stream)
    if not stream:
        return reply.choices[0].message.content, reply.choices[0].finish_reason
    chunks = list(reply)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].choices[0].finish_reason


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_bounds_on_the_tokens(
    client: OpenAI, model: str, sample: tuple[Path, str], field: str, stream: bool
) -> None:
    image, caption = sample
    text, reason = ask(client, stream, model=model, messages=messages(image), **{field: 3})
    assert (text, reason) == (" ".join(caption.split()[:3]), "length")
    # More than the model holds is as much as it holds: clients send such bounds to any model.
    assert ask(client, stream, model=model, messages=messages(image), **{field: 4096}) == (caption, "stop")


def test_a_seed_repeats_and_others_differ(client: OpenAI, model: str, sample: tuple[Path, str]) -> None:
    request: dict[str, Any] = {"model": model, "messages": messages(sample[0]), "temperature": 2.0}
    request["extra_body"] = {"prompt": "gray"}
    texts = [ask(client, stream, **request, seed=seed)[0] for seed in (1, 2, 3, 4) for stream in (False, True)]
    assert texts[::2] == texts[1::2]
    assert len(set(texts)) > 1
    nucleus = {ask(client, False, **request, seed=seed, top_p=top_p)[0] for seed in (1, 2) for top_p in (0, 1e-6)}
    assert nucleus == {ask(client, False, **request | {"temperature": 0})[0]}


def test_beams(client: OpenAI, model: str, sample: tuple[Path, str]) -> None:
    image, caption = sample
    request: dict[str, Any] = {"model": model, "messages": messages(image), "extra_body": {"num_beams": 3}}
    assert ask(client, False, **request) == (caption, "stop")
    with pytest.raises(openai.UnprocessableEntityError, match="be 1 for a stream"):
        ask(client, True, **request)


def test_what_clients_send_without_being_told_to_is_taken(
    client: OpenAI, model: str, sample: tuple[Path, str]
) -> None:
    image, caption = sample
    reply = client.chat.completions.create(
        model=model,
        messages=messages(image),
        n=1,
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        logprobs=False,
        response_format={"type": "text"},
        user="somebody",
        tools=[],
        store=False,
        stop=None,
        seed=None,
    )
    assert reply.choices[0].message.content == caption


TOOL = {"type": "function", "function": {"name": "f"}}
ONE = "data:image/png;base64,aa=="


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"n": 2}, "unsupported_option", "n"),
        ({"logprobs": True}, "unsupported_option", "logprobs"),
        ({"tools": [TOOL], "tool_choice": "required"}, "unsupported_option", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": TOOL}, "unsupported_option", "tool_choice"),
        ({"response_format": {"type": "structural_tag"}}, "unsupported_option", "response_format"),
        ({"extra_body": {"beams": 2}}, "unknown_option", "beams"),
        ({"temperature": 3}, "invalid_option", "temperature"),
        ({"top_p": "x"}, "invalid_option", "top_p"),
        ({"max_tokens": 0}, "invalid_option", "max_tokens"),
        ({"max_completion_tokens": 1.5}, "invalid_option", "max_completion_tokens"),
        ({"seed": 2**64}, "invalid_option", "seed"),
        ({"stop": ["a"] * 17}, "invalid_option", "stop"),
        ({"stop": [""]}, "invalid_option", "stop"),
        ({"stream_options": ["include_usage"]}, "invalid_option", "stream_options"),
        ({"messages": []}, "invalid_option", "messages"),
        ({"messages": [{"role": "user", "content": "a text"}]}, "missing_image", None),
        ({"messages": [{"role": "user", "content": []}]}, "missing_image", None),
        ({"messages": "a text"}, "invalid_option", "messages"),
        ({"messages": ["a text"]}, "invalid_option", "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "missing_image", None),
        ({"messages": [{"role": "somebody", "content": []}]}, "invalid_option", "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": []}]}, "invalid_option", "messages[0].role"),
        ({"messages": [*messages(ONE), {"role": "user", "content": 1}]}, "invalid_option", "messages[1].content"),
        ({"extra_body": {"prompt": 5}}, "invalid_option", "prompt"),
        ({"messages": messages("data:image/png;base64,no!")}, "unprocessable_image", None),
        ({"messages": messages("aa==")}, "invalid_option", "messages[0].content[0].image_url.url"),
        ({"messages": messages("file:///etc/passwd")}, "invalid_option", "messages[0].content[0].image_url.url"),
        ({"messages": messages("https://example.com/a.png")}, "image_url_refused", None),
        ({"messages": messages("http://127.0.0.1/a.png")}, "image_url_refused", None),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_with_a_sentence(
    client: OpenAI, model: str, sample: tuple[Path, str], change: dict[str, Any], code: str, param: str | None
) -> None:
    request: dict[str, Any] = {"model": model, "messages": messages(sample[0]), **change}
    for stream in (False, True):
        with pytest.raises(openai.UnprocessableEntityError) as failed:
            client.chat.completions.create(**{"stream": stream, **request})
        error = failed.value
        assert (error.code, error.param, error.type) == (code, param, "invalid_request_error")
        assert error.body["message"].endswith(".")  # type: ignore[index]


def test_a_response_whole_and_streamed(client: OpenAI, model: str, samples: dict[Path, str]) -> None:
    for image, caption in samples.items():
        image_part = {"type": "input_image", "image_url": data_uri(image), "detail": "auto"}
        content: Any = [{"type": "input_text", "text": "What is in this image?"}, image_part]
        asked: Any = {"model": model, "input": [{"role": "user", "content": content}]}
        whole = client.responses.create(**asked, instructions="Be brief.", max_output_tokens=300, store=False)
        assert (whole.output_text, whole.status, whole.error) == (caption, "completed", None)
        assert whole.usage is not None
        assert whole.usage.output_tokens == whole.usage.total_tokens > 3
        with client.responses.stream(**asked, temperature=0) as stream:
            events = list(stream)
            assert stream.get_final_response().output_text == caption
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == caption
        assert len(deltas) == whole.usage.output_tokens  # an event a token: the demo model's are whole words
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")


def test_replies_have_all_members_that_the_client_declares(url: str, model: str, sample: tuple[Path, str]) -> None:
    """A member that a reply lacks is an AttributeError in a program that reads it."""
    content: Any = [{"type": "input_image", "image_url": data_uri(sample[0]), "detail": "auto"}]
    asked: Any = {"model": model, "input": [{"role": "user", "content": content}]}
    chat: Any = {"model": model, "messages": messages(sample[0])}
    with OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, _strict_response_validation=True) as strict:
        for limit in (3, 300):
            assert strict.chat.completions.create(**chat, max_tokens=limit).usage
            assert list(strict.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
            usage = strict.responses.create(**asked, max_output_tokens=limit).usage
            assert usage is not None
            assert usage.input_tokens_details.cache_write_tokens == 0
            assert list(strict.responses.create(**asked, max_output_tokens=limit, stream=True))
        assert strict.models.retrieve(model) == next(iter(strict.models.list()))


def test_a_response_that_reaches_its_limit_is_incomplete(
    client: OpenAI, model: str, sample: tuple[Path, str]
) -> None:
    image, caption = sample
    content: Any = [{"type": "input_image", "image_url": data_uri(image), "detail": "auto"}]
    asked: Any = {"model": model, "input": [{"role": "user", "content": content}], "max_output_tokens": 3}
    *_, last = client.responses.create(**asked, stream=True)
    for reply in (client.responses.create(**asked), last.response):
        assert reply.output_text == " ".join(caption.split()[:3])
        assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.responses.create(**asked, previous_response_id="resp_1")
    assert (refused.value.code, refused.value.param) == ("unsupported_option", "previous_response_id")


class AltText(BaseModel):
    """Declares the object that a program wants in place of a text."""

    alt_text: str = Field(description="The alt text.", max_length=24)


class Photo(BaseModel):
    caption: str
    tags: list[str]


def test_a_program_s_own_type_is_filled(client: OpenAI, model: str, sample: tuple[Path, str]) -> None:
    image, caption = sample
    parsed = client.chat.completions.parse(model=model, messages=messages(image), response_format=AltText)
    found = parsed.choices[0].message.parsed
    assert found is not None
    assert caption.startswith(found.alt_text)
    assert len(found.alt_text) <= 24 < len(caption)
    content: Any = [{"type": "input_image", "image_url": data_uri(image), "detail": "auto"}]
    given: Any = [{"role": "user", "content": content}]
    assert client.responses.parse(model=model, input=given, text_format=AltText).output_parsed == found
    with pytest.raises(openai.UnprocessableEntityError, match="cannot be constrained to a schema"):
        client.chat.completions.parse(model=model, messages=messages(image), response_format=Photo)


def test_other_failures_have_the_same_shape(client: OpenAI, model: str, sample: tuple[Path, str]) -> None:
    with pytest.raises(openai.NotFoundError) as wrong:
        client.chat.completions.create(model="gpt-4o", messages=messages(sample[0]))
    assert wrong.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as nowhere:
        client.embeddings.create(model=model, input="x")
    assert nowhere.value.code == "not_found"
    with pytest.raises(openai.APIStatusError) as method:
        client.get("/chat/completions", cast_to=object)
    assert (method.value.status_code, method.value.code) == (405, "method_not_allowed")
    assert method.value.response.headers["allow"] == "POST"
    with pytest.raises(openai.BadRequestError) as broken:
        client.post("/chat/completions", cast_to=object, content=b"{")
    assert broken.value.code == "invalid_json"
    assert broken.value.request_id
