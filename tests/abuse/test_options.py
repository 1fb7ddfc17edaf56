"""Every option of every API with values that no client means: each is answered, none by a server's error."""

import base64
import itertools
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from support.attacks.abuse import Abused
from support.servers.raw_http import connected, read_all, statuses

from snapcap.service.captioning.options import NAMES

JSON = {"Content-Type": "application/json"}
VALUES: tuple[Any, ...] = (
    None,
    True,
    "",
    "0",
    "nan",
    "-1",
    0,
    -0.0,
    1,
    -1,
    2,
    0.5,
    1e-320,
    1e308,
    -1e308,
    1.5,
    16,
    2**31 - 1,
    2**31,
    2**63 - 1,
    2**63,
    10**400,
    [],
    [1],
    {},
    {"a": None},
    "a" * 9_999,
    "\0\x1f\u202e\ufeff",
    "\U0010ffff" * 500,
    "never",
)
# Of the other APIs' own fields.
CHAT = (
    "model",
    "stream",
    "stream_options",
    "stop",
    "n",
    "logit_bias",
    "response_format",
    "tools",
    "user",
    "messages",
)
OLLAMA = ("model", "stream", "keep_alive", "format", "think", "options", "messages", "prompt", "images", "name")
OLLAMA_OPTIONS = ("num_predict", "repeat_penalty", "stop", "num_ctx", "mirostat", "presence_penalty")
CHAT_OPTIONS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "text",
    "input",
    "instructions",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "num_beams",
)
SEED = 1_234


def bodies(image: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and JSON document: one value of one field each."""
    content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}]
    chat = {"model": "demo", "messages": [{"role": "user", "content": content}]}
    tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [image]}
    for name, value in itertools.product(NAMES, VALUES):
        yield "/v1/caption", {"image": image, name: value}
        yield "/", {"inputs": image, "parameters": {name: value}}
        yield "/v2/models/demo/infer", {"inputs": [tensor], "parameters": {name: value}}
    for name, value in itertools.product((*CHAT, *CHAT_OPTIONS), VALUES):
        yield "/v1/chat/completions", {**chat, name: value}
        yield "/v1/responses", {"model": "demo", "input": chat["messages"], name: value}
    for name, value in itertools.product((*OLLAMA_OPTIONS, *NAMES), VALUES):
        yield "/api/generate", {"images": [image], "stream": False, "options": {name: value}}
    for name, value in itertools.product(OLLAMA, VALUES):
        yield "/api/chat", {"messages": [{"role": "user", "images": [image]}], name: value}
        yield "/api/generate", {"images": [image], name: value}
        yield "/api/show", {"model": "demo", name: value}
    for name, value in itertools.product(tensor, VALUES):
        yield "/v2/models/demo/infer", {"inputs": [{**tensor, name: value}]}
    for value in VALUES:
        yield "/v1/caption", {"image": value}
        yield "/", {"inputs": value}
        yield "/v2/models/demo/infer", {"inputs": [tensor], "id": value, "outputs": value}


def test_values_of_options(abused: Abused) -> None:
    """A sample of all, drawn anew with a fixed seed; half of the captions that come of it are of other lengths, so
    that rows of all ages run together."""
    picture = next(iter(abused.samples)).read_bytes()
    asked = random.Random(SEED).sample(list(bodies(base64.b64encode(picture).decode())), 500)

    def attack() -> None:
        answered = set()
        for path, document in asked:
            status, reply, _ = abused.server.call(path, json.dumps(document).encode(), JSON)
            assert status == 200 or 400 <= status < 500 or status == 504, (path, document, reply)
            answered.add(status)
        assert {200, 422} <= answered

    abused.withstands(attack)


def test_fields_that_nobody_reads(abused: Abused) -> None:
    """Their names are compared with those of the options, and come back in a header: few, and not as sent."""
    image = base64.b64encode(next(iter(abused.samples)).read_bytes()).decode()
    evil = {"a\r\nX-Evil: 1": 1, "b, c": 1, "é\0\ud800": 1, "x" * 50_000: 1}
    floods: dict[str, tuple[dict[str, Any], int]] = {
        "names": (evil, 200),
        "nearly": ({f"max_tokens_of_completion_penalty_{number}": 1 for number in range(60)}, 200),
        "many": ({f"unknown{number}z": 1 for number in range(5_000)}, 422),
        "deep": ({"unknown": json.loads("[" * 900 + "]" * 900)}, 200),
    }

    def attack() -> None:
        for name, (fields, status) in floods.items():
            generate = {"images": [image], "stream": False}
            for path, document in (
                ("/v1/caption", {"image": image}),
                ("/", {"inputs": image}),
                ("/api/generate", generate),
            ):
                body = json.dumps({**document, **fields}).encode()
                for _ in range(5):
                    found, reply, headers = abused.server.call(path, body, JSON)
                    assert found == status, (name, reply)
                    assert "x-evil" not in {each.lower() for each in headers}
                    assert sum(len(value) for value in headers.values()) < 2_000

    abused.withstands(attack)


def test_conversations_without_end(abused: Abused) -> None:
    """Every message is looked at, and no image but the last is decoded."""
    picture = base64.b64encode(next(iter(abused.samples)).read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": f"data:image/png;base64,{picture}"}]
    asked = {"role": "user", "content": parts}
    answered = {
        "short": ([{"role": "system"}] * 5_000 + [asked], 200),
        "parts": ([{"role": "user", "content": [{"type": "text", "text": "a"}] * 3_000 + parts}], 200),
        "images": (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x" * 2_000}]}] * 800 + [asked],
            200,
        ),
        "too many": ([{"role": "user", "content": "a"}] * 50_000, 413),
    }

    def attack() -> None:
        for name, (messages, status) in answered.items():
            body = json.dumps({"model": "demo", "messages": messages}).encode()
            for _ in range(5):
                found, reply, _ = abused.server.call("/v1/chat/completions", body, JSON)
                assert found == status, (name, reply)

    abused.withstands(attack)


def test_values_in_queries(abused: Abused) -> None:
    picture = next(iter(abused.samples)).read_bytes()
    texts = (*(str(value) for value in VALUES), "1e999", "0x10", "1_000", "٣", "1 ", "+1", "%", "1;2")
    asked = random.Random(SEED).sample(list(itertools.product(NAMES, texts)), 200)

    def attack() -> None:
        for name, text in asked:
            status, reply, _ = abused.server.call(f"/v1/caption?{name}={quote(text[:3_000])}", picture)
            assert status in (200, 422, 504), (name, text, reply)

    abused.withstands(attack)


def test_searches_of_every_width_at_once(abused: Abused) -> None:
    """Beams that do not fit into what is free wait, and let nobody wait for ever."""
    picture = next(iter(abused.samples)).read_bytes()

    def ask(turn: int) -> int:
        query = f"num_beams={1 + turn % 8}&max_new_tokens={1 + turn % 15}"
        return abused.server.call(f"/v1/caption?{query}", picture)[0]

    def attack() -> None:
        with ThreadPoolExecutor(12) as pool:
            answered = list(pool.map(ask, range(96)))
        assert set(answered) <= {200, 422, 429}, answered
        assert answered.count(200) > 12

    abused.withstands(attack)


def test_queries_and_scrapes_at_once(abused: Abused) -> None:
    """Of eight clients that ask again and again for what is dear to read or to write."""
    longest = "format=" + "%41" * 2700
    accept = {"Accept": "application/openmetrics-text;version=1.0.0," * 20}
    requests = [
        ("GET", "/startup?" + "a=1&" * 6000, {}),
        ("GET", "/startup?" + "a" * 9000, {}),
        ("GET", f"/startup?{longest}", {}),
        ("POST", f"/v1/caption?prompt={'%F0%9F%98%80' * 650}", {}),
        ("GET", "/" + "%41" * 3300, {}),
        ("GET", "/metrics", accept),
        ("GET", "/metrics", {"Accept": "text/plain," * 2500}),
        ("GET", "/metrics", {}),
    ]

    def client(number: int) -> None:
        method, path, fields = requests[number]
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nConnection: close\r\n{lines}\r\n"
        for _ in range(5 if path == "/metrics" else 50):
            with connected(abused.port) as connection:
                connection.sendall(head.encode())
                (status,) = statuses(read_all(connection))
            assert status < 500, (path[:40], status)

    def attack() -> None:
        with ThreadPoolExecutor(len(requests)) as clients:
            list(clients.map(client, range(len(requests))))

    abused.withstands(attack)
