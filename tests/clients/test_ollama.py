"""The `ollama` package against a real server, and the requests of photo tools that speak Ollama's API.

Which fields each tool sends, from its source:

- PhotoPrism (internal/ai/vision: api_request.go, api_ollama.go, engine_ollama.go) posts to /api/generate `id`,
  `model` with a tag, `prompt`, `suffix` "", `options` with `temperature`, and for labels `top_p` and `stop`,
  `stream` false, `images` with one base64 text, and for labels `format` "json". It reads `response` and `model`.
- Frigate (frigate/genai/plugins/ollama.py, before genai/ollama.py) asks /api/show for the model when it starts,
  then sends, through the `ollama` package, /api/chat, and before /api/generate: `options` with `temperature` 0.5,
  `repeat_penalty` 1.05 and `presence_penalty` 0.3, in place of which its user may set `options` and `keep_alive`.
  Text has "[img]" where an image stands. It reads `done`, `message.content` and the counts of tokens.
- Home Assistant (homeassistant/components/ollama: __init__.py, entity.py) lists the models by /api/tags, then sends
  through the `ollama` package /api/chat with `stream` true, `tools`, `options` with `num_ctx`, `think` false,
  `keep_alive` -1 or a text such as "300s", and, for a task with a structure, its schema as `format`.
- Open WebUI (backend/open_webui/routers/ollama.py, utils/payload.py) asks /api/version, /api/tags and /api/ps, and
  posts to /api/chat `messages` with base64 in `images`, `options` with what its user set, and `stream` true. It
  compares `version` as numbers, and reads `expires_at` as a time of ISO 8601.
- The npm package `ollama` 0.6.4 in Node.js 20 sends the bytes of JAVASCRIPT, recorded on the socket, on one
  connection. It takes a line of a stream by "\\n", and ends at the first with `done`.
"""

import asyncio
import base64
import json
import socket
from collections.abc import Iterator
from datetime import datetime
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from support.servers.server_process import ServerProcess

JSON = {"Content-Type": "application/json"}
PROMPT = "Create a caption with exactly one sentence in the active voice that describes the main visual content."


# Each request of the JavaScript client: its method and path, its body, and the status of the reply.
JAVASCRIPT = (
    ("GET /api/version", "", 200),
    ("GET /api/tags", "", 200),
    ("GET /api/ps", "", 200),
    ("POST /api/show", '{"model":"demo"}', 200),
    ("POST /api/generate", '{"model":"demo","prompt":"What is it?","images":["IMAGE"],"stream":false}', 200),
    ("POST /api/generate", '{"model":"demo","prompt":"","images":["IMAGE"],"stream":true,"think":false}', 200),
    (
        "POST /api/chat",
        '{"model":"demo","messages":[{"role":"system","content":"Be brief."},'
        '{"role":"user","content":"What is it?","images":["IMAGE"]}],'
        '"format":"json","keep_alive":-1,"stream":false}',
        200,
    ),
    (
        "POST /api/chat",
        '{"model":"demo:latest","messages":[{"role":"user","content":"What is it?","images":["IMAGE"]}],'
        '"stream":true,"format":{"type":"object","properties":{"caption":{"type":"string"}},'
        '"required":["caption"]},"think":false,"options":{"num_ctx":4096,"stop":["\\n"]}}',
        200,
    ),
    ("POST /api/generate", '{"model":"demo","prompt":"","stream":false}', 200),
    ("POST /api/chat", '{"model":"demo","messages":[],"keep_alive":0,"stream":false}', 200),
    ("POST /api/show", '{"model":"llava"}', 404),
    ("POST /api/generate", '{"model":"demo","prompt":"hi","stream":true}', 422),
    ("DELETE /api/delete", '{"name":"demo"}', 404),
)
JAVASCRIPT_HEAD = (
    "host: 127.0.0.1:8732\r\nconnection: keep-alive\r\nContent-Type: application/json\r\n"
    "Accept: application/json\r\nUser-Agent: ollama-js/0.6.4 (x64 linux Node.js/v20.20.2)\r\n"
    "accept-language: *\r\nsec-fetch-mode: cors\r\n"
    "accept-encoding: gzip, deflate\r\n"
)


@pytest.fixture
def client(url: str) -> Iterator[ollama.Client]:
    with ollama.Client(host=url) as client:
        yield client


def encoded(image: Path) -> str:
    return base64.b64encode(image.read_bytes()).decode()


def test_models(client: ollama.Client, model: str) -> None:
    (listed,) = client.list().models
    (loaded,) = client.ps().models
    assert listed.model == loaded.model == f"{model}:latest"
    assert listed.modified_at is not None
    assert loaded.expires_at is not None
    for name in (model, f"{model}:latest"):
        shown = client.show(name)
        assert shown.capabilities == ["completion", "vision"]
        assert shown.modelinfo is not None
    with pytest.raises(ollama.ResponseError, match="is not served here") as missing:
        client.show("llava")
    assert missing.value.status_code == 404


def test_every_sample_whole_and_streamed(client: ollama.Client, model: str, samples: dict[Path, str]) -> None:
    for image, caption in samples.items():
        whole = client.generate(model, images=[image])
        assert (whole.response, whole.done, whole.done_reason, whole.model) == (caption, True, "stop", model)
        assert whole.eval_count is not None
        assert whole.eval_count > 3
        assert whole.total_duration is not None
        assert whole.eval_duration is not None
        assert whole.total_duration > whole.eval_duration > 0
        *pieces, last = client.generate(model, "What is it?", images=[image.read_bytes()], stream=True)
        assert "".join(piece.response or "" for piece in pieces) == caption
        assert len(pieces) == whole.eval_count == last.eval_count  # the demo model's tokens are whole words
        assert (last.done, last.response) == (True, "")
        message: Any = {"role": "user", "content": "What is it?", "images": [str(image)]}
        assert client.chat(model, [message]).message.content == caption
        chunks = list(client.chat(f"{model}:latest", [message], stream=True, keep_alive="5m"))
        assert "".join(chunk.message.content or "" for chunk in chunks) == caption
        assert chunks[-1].done_reason == "stop"


def test_the_asynchronous_client(url: str, model: str, sample: tuple[Path, str]) -> None:
    image, caption = sample

    async def ask() -> str:
        async with ollama.AsyncClient(host=url) as client:
            stream = await client.generate(model, images=[image], stream=True, options=ollama.Options(seed=1))
            return "".join([piece.response or "" async for piece in stream])

    assert asyncio.run(ask()) == caption


def test_options(client: ollama.Client, model: str, sample: tuple[Path, str]) -> None:
    image, caption = sample
    words = caption.split()
    short = client.generate(model, images=[image], options={"num_predict": 3})
    assert (short.response, short.done_reason, short.eval_count) == (" ".join(words[:3]), "length", 3)
    stopped = client.generate(model, images=[image], options=ollama.Options(stop=[f" {words[2]}"]))
    assert (stopped.response, stopped.done_reason) == (" ".join(words[:2]), "stop")
    cut = client.generate(model, images=[image], options={"max_chars": 24}).response
    assert cut == caption[:25].rpartition(" ")[0]
    hot = {"temperature": 2.0, "prompt": "gray"}
    drawn = [
        client.generate(model, images=[image], options={**hot, "seed": seed}).response for seed in (1, 1, 2, 3)
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1


def test_an_empty_prompt_loads_the_model(client: ollama.Client, model: str) -> None:
    for keep_alive in (None, 0, -1, "10m"):
        assert client.generate(model, keep_alive=keep_alive).done_reason == "load"
        assert client.chat(model, keep_alive=keep_alive).done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="a duration such as"):
        client.generate(model, keep_alive="soon")


def test_a_program_s_own_type_is_filled(client: ollama.Client, model: str, sample: tuple[Path, str]) -> None:
    image, caption = sample
    schema = {"type": "object", "properties": {"alt_text": {"type": "string"}}, "required": ["alt_text"]}
    assert json.loads(client.generate(model, images=[image], format=schema).response or "") == {"alt_text": caption}
    assert json.loads(client.generate(model, images=[image], format="json").response or "") == {"caption": caption}
    schema["required"].append("tags")  # type: ignore[attr-defined]
    with pytest.raises(ollama.ResponseError, match="cannot be constrained to a schema") as refused:
        client.generate(model, images=[image], format=schema)
    assert refused.value.status_code == 422


def test_failures(client: ollama.Client, model: str, sample: tuple[Path, str]) -> None:
    for stream in (False, True):
        for asked, status in (
            ({"model": "llava", "images": [sample[0]]}, 404),
            ({"model": model, "images": [b"no image"]}, 422),
            ({"model": model, "prompt": "Why is the sky blue?"}, 422),
        ):
            with pytest.raises(ollama.ResponseError) as failed:
                list(client.generate(**asked, stream=stream))
            assert failed.value.status_code == status
            assert failed.value.error.endswith(".")
    with pytest.raises(ollama.ResponseError) as elsewhere:
        client.embed(model, "x")
    assert elsewhere.value.status_code == 404


def test_what_the_javascript_client_sends(server: ServerProcess, model: str, sample: tuple[Path, str]) -> None:
    image, caption = sample
    said = []
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        for asked, text, status in JAVASCRIPT:
            body = text.replace("demo", model).replace("IMAGE", encoded(image))
            length = f"content-length: {len(body)}\r\n" if body else ""
            connection.sendall(f"{asked} HTTP/1.1\r\n{JAVASCRIPT_HEAD}{length}\r\n{body}".encode())
            reply = HTTPResponse(connection, method=asked.partition(" ")[0])
            reply.begin()
            lines = [json.loads(line) for line in reply.read().split(b"\n") if line]
            kind = str(reply.getheader("content-type"))
            assert (reply.status, reply.will_close) == (status, False), (asked, lines)
            if status != 200:  # the client reads a message of JSON alone
                assert (kind, type(lines[0]["error"])) == ("application/json", str)
            elif '"images"' in text:
                assert [each["done"] for each in lines] == [False] * (len(lines) - 1) + [True]
                assert (len(lines) > 1) is ('"stream":true' in text)
                pieces = [each["message"]["content"] if "chat" in asked else each["response"] for each in lines]
                said.append("".join(pieces))
    assert said == [caption, caption, *[json.dumps({"caption": caption})] * 2]


def test_what_photoprism_sends(server: ServerProcess, model: str, sample: tuple[Path, str]) -> None:
    image, caption = sample
    asked = {
        "id": "0b9e7a1c-2a44-4f6c-8f5e-6a4b1d0c9f11",
        "model": f"{model}:latest",
        "prompt": PROMPT,
        "suffix": "",
        "options": {"temperature": 0.1, "seed": 3, "num_ctx": 4096, "top_p": 0.9, "stop": ["\n\n"]},
        "stream": False,
        "images": [encoded(image)],
    }
    status, reply, headers = server.call("/api/generate", json.dumps(asked).encode(), JSON)
    assert (status, reply["model"], reply["done"]) == (200, f"{model}:latest", True)
    assert reply["response"]
    assert headers["x-snapcap-ignored"] == "text, id, num_ctx"
    del asked["options"]
    assert server.call("/api/generate", json.dumps(asked).encode(), JSON)[1]["response"] == caption
    labels = {**asked, "system": "You are a PhotoPrism vision model.", "format": "json"}
    assert json.loads(server.call("/api/generate", json.dumps(labels).encode(), JSON)[1]["response"])


def test_what_frigate_sends(
    client: ollama.Client, model: str, sample: tuple[Path, str], samples: dict[Path, str]
) -> None:
    image, caption = sample
    options = {"temperature": 0.5, "repeat_penalty": 1.05, "presence_penalty": 0.3}
    assert client.show(model).get("error") is None
    message: Any = {"role": "user", "content": "[img]\nDescribe the person.", "images": [image.read_bytes()]}
    reply = client.chat(model=model, messages=[message], options=options, keep_alive="30m")
    assert (reply.done, bool(reply.message.content)) == (True, True)
    assert reply.eval_count is not None
    before = client.generate(model, "Describe the person.", images=[image.read_bytes()], options=options)
    assert before["response"]
    greedy = {**options, "temperature": 0, "repeat_penalty": 1}
    assert client.chat(model=model, messages=[message], options=greedy).message.content == caption
    assert client.chat(model=model, messages=[message], options={"num_predict": 1}).prompt_eval_count == 0
    # A review, and an event without `use_snapshot`, have several frames; the newest is the last.
    message["images"] = [*(each.read_bytes() for each in samples), image.read_bytes()]
    assert client.chat(model=model, messages=[message], options=greedy).message.content == caption
    assert client.generate(model, images=message["images"], options=greedy).response == caption


def test_what_home_assistant_sends(url: str, model: str, sample: tuple[Path, str]) -> None:
    image, caption = sample
    structure = {"type": "object", "properties": {"description": {"type": "string"}}, "required": ["description"]}

    async def ask(**more: Any) -> str:
        async with ollama.AsyncClient(host=url) as client:
            assert (await client.list()).models
            stream = await client.chat(
                model=model,
                messages=[
                    ollama.Message(role="system", content="You are a voice assistant for Home Assistant."),
                    ollama.Message(role="user", content="What is it?", images=[ollama.Image(value=image)]),
                ],
                tools=None,
                stream=True,
                options={"num_ctx": 8192},
                think=False,
                **more,
            )
            return "".join([part["message"].get("content") or "" async for part in stream])

    assert asyncio.run(ask(keep_alive=-1, format=None)) == caption
    assert json.loads(asyncio.run(ask(keep_alive="300s", format=structure))) == {"description": caption}


def test_what_open_webui_sends(server: ServerProcess, model: str, sample: tuple[Path, str]) -> None:
    image, caption = sample
    version = server.call("/api/version")[1]["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    (listed,) = server.call("/api/tags")[1]["models"]
    (loaded,) = server.call("/api/ps")[1]["models"]
    assert loaded["name"] == listed["model"]
    assert int(datetime.fromisoformat(loaded["expires_at"]).timestamp()) > 0
    asked = {
        "model": listed["model"],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is it?", "images": [encoded(image)]},
        ],
        "options": {"temperature": 0, "num_ctx": 2048, "mirostat": 0, "repeat_last_n": 64},
        "keep_alive": "5m",
        "stream": True,
    }
    reply = httpx.post(f"http://127.0.0.1:{server.port}/api/chat", json=asked)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/x-ndjson")
    found = [json.loads(line) for line in reply.text.splitlines()]
    assert "".join(line["message"]["content"] for line in found) == caption
    assert (found[-1]["done"], found[-1]["eval_count"]) == (True, len(found) - 1)
