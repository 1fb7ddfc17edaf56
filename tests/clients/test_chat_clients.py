"""What chat clients send, as they send it: LangChain through the `openai` package, Open WebUI on its own."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from support.servers.server_process import ServerProcess

QUESTION = "What's in this image?"
SYSTEM = "You are a helpful assistant that describes images."


def data_uri(image: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}"


def conversations(image: str, earlier: str) -> dict[str, tuple[list[Any], str]]:
    """Messages, and what of them is ignored."""
    text, picture = {"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": image}}
    detailed = {"type": "image_url", "image_url": {"url": image, "detail": "auto"}}
    system = {"role": "system", "content": SYSTEM}
    asked = {"role": "user", "content": [text, picture]}
    # LangChain keeps `content` null beside a call of a tool, and sends what the call returned.
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    return {
        "a question": ([asked], "text"),
        "a system message": ([system, asked], "system, text"),
        "a developer's message in parts": (
            [{"role": "developer", "content": [{"type": "text", "text": SYSTEM}]}, asked],
            "system, text",
        ),
        "an image without a question": ([{"role": "user", "content": [detailed]}], ""),
        "an image_url that is a text": (
            [system, {"role": "user", "content": [text, {"type": "image_url", "image_url": image}]}],
            "system, text",
        ),
        "two texts around the image": (
            [{"role": "user", "name": "somebody", "content": [text, picture, text]}],
            "text",
        ),
        "a question after the caption": (
            [system, asked, {"role": "assistant", "content": "a cat"}, {"role": "user", "content": "What colour?"}],
            "replies, system, text",
        ),
        "another image in the same conversation": (
            [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": earlier}}]},
                {"role": "assistant", "content": "a cat", "refusal": None},
                {"role": "user", "content": [picture]},
            ],
            "images, replies",
        ),
        "tools that were called before": (
            [
                {"role": "user", "content": "What time is it?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "noon", "tool_call_id": "1"},
                {"role": "user", "content": [picture]},
            ],
            "replies, text",
        ),
    }


@pytest.fixture
def openai_client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("name", conversations("", ""))
def test_langchain(openai_client: OpenAI, model: str, samples: dict[Path, str], name: str) -> None:
    """`ChatOpenAI(model=…, temperature=…, max_tokens=…).invoke` and `.stream` give this to `openai`."""
    (earlier, _), (image, caption) = list(samples.items())[:2]
    messages, ignored = conversations(data_uri(image), data_uri(earlier))[name]
    settings: dict[str, Any] = {"model": model, "temperature": 0.0, "max_completion_tokens": 256, "n": 1}
    create = openai_client.chat.completions.with_raw_response.create
    invoked = create(messages=messages, stream=False, **settings)
    assert invoked.headers.get("x-snapcap-ignored", "") == ignored
    whole = invoked.parse()
    assert whole.choices[0].message.content == caption
    assert (whole.usage.prompt_tokens, whole.system_fingerprint) == (0, None)
    streamed = create(messages=messages, stream=True, stream_options={"include_usage": True}, **settings)
    assert streamed.headers.get("x-snapcap-ignored", "") == ignored
    *chunks, last = streamed.parse()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == caption
    assert last.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("name", conversations("", ""))
def test_open_webui(server: ServerProcess, model: str, samples: dict[Path, str], name: str) -> None:
    """Its backend posts what its page has put together, with the fields that an administrator may have set."""
    (earlier, _), (image, caption) = list(samples.items())[:2]
    messages, ignored = conversations(data_uri(image), data_uri(earlier))[name]
    request: dict[str, Any] = {
        "stream": True,
        "model": model,
        "messages": messages,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 4096,
        "top_p": 0.9,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "seed": 7,
        "stop": ["\n\n"],
        "logit_bias": {},
        "user": "3f6c",
        "metadata": {"chat_id": "1", "message_id": "2", "features": {"web_search": False}},
    }
    headers = {"Content-Type": "application/json", "Authorization": "Bearer sk-none", "X-OpenWebUI-User-Name": "a"}
    status, body, received = server.call("/v1/chat/completions", json.dumps(request).encode(), headers)
    assert status == 200, body
    assert {name.lower(): value for name, value in received.items()}.get("x-snapcap-ignored", "") == ignored
    assert deltas(body) == caption
    # The title of a chat, which it asks for without the image, is no caption.
    request = {"model": model, "messages": [{"role": "user", "content": "### Task:\nGenerate a title"}]}
    status, body, _ = server.call("/v1/chat/completions", json.dumps(request).encode(), headers)
    assert (status, body["error"]["code"]) == (422, "missing_image")


def deltas(body: Any) -> str:
    events = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_the_model_is_listed_for_them(openai_client: OpenAI, model: str) -> None:
    assert [each.id for each in openai_client.models.list()] == [model]
