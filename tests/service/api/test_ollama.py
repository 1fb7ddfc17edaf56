"""Ollama's API: lines and whole replies, the options, names of models, and requests that only load a model."""

import base64
import json
import math
from collections.abc import Callable
from datetime import datetime
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient
from support.servers.live_app import create_app

from snapcap.service.api.app import Services
from snapcap.service.api.ollama import OPTIONS, parse_keep_alive
from snapcap.service.captioning.captioner import WeightFiles, meant
from snapcap.service.config.settings import HttpSettings
from snapcap.service.errors import EngineFailed, InvalidOption
from snapcap.service.http.bodies import BodyLimits

Png = Callable[..., bytes]
COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count")


@pytest.fixture
def picture(image: Png) -> Callable[[int], str]:
    """``picture(5)``: an image in base64 whose caption is "5 7"."""
    return lambda colour: base64.b64encode(image(colour)).decode()


def lines(reply: Any) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.text.endswith("\n")
    return [json.loads(line) for line in reply.text.splitlines()]


def test_a_caption_is_streamed_unless_that_is_refused(client: TestClient, picture) -> None:
    *pieces, last = lines(client.post("/api/generate", json={"model": "fake", "images": [picture(5)]}))
    assert [piece["response"] for piece in pieces] == ["5", " 7"]
    assert [piece["done"] for piece in pieces] == [False, False]
    assert (last["response"], last["done"], last["done_reason"]) == ("", True, "stop")
    whole = client.post("/api/generate", json={"model": "fake", "images": [picture(5)], "stream": False}).json()
    assert (whole["response"], whole["model"]) == ("5 7", "fake")
    assert whole.keys() == last.keys()
    for end in (last, whole):
        assert all(type(end[count]) is int for count in COUNTS)
        assert (end["eval_duration"], end["total_duration"] > 0) == (3_000_000, True)
        assert (end["eval_count"], end["prompt_eval_count"], end["load_duration"]) == (2, 0, 0)
        assert end["prompt_eval_duration"] > 2_000_000
        assert datetime.fromisoformat(end["created_at"]).tzinfo is not None


def test_a_chat_captions_its_newest_image(client: TestClient, picture) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?", "images": [picture(5)]},
        {"role": "assistant", "content": "5 7"},
        {"role": "user", "content": "And this?", "images": [picture(9)]},
    ]
    reply = client.post("/api/chat", json={"model": "fake", "messages": messages})
    *pieces, last = lines(reply)
    assert [piece["message"] for piece in pieces] == [
        {"role": "assistant", "content": "9"},
        {"role": "assistant", "content": " 7"},
    ]
    assert last["message"] == {"role": "assistant", "content": ""}
    assert reply.headers["x-snapcap-ignored"] == "images, replies, system, text"


def test_the_last_of_several_images_is_captioned_and_the_reply_says_so(client: TestClient, picture) -> None:
    pictures = [picture(5), picture(6), picture(9)]
    message = {"role": "user", "content": "What changes?", "images": pictures}
    for path, asked in (
        ("/api/generate", {"images": pictures, "prompt": "What changes?"}),
        ("/api/chat", {"messages": [message]}),
    ):
        streamed = client.post(path, json=asked)
        whole = client.post(path, json={**asked, "stream": False})
        *pieces, last = lines(streamed)
        texts = [piece.get("response") or piece["message"]["content"] for piece in pieces]
        said = whole.json()
        assert "".join(texts) == (said.get("response") or said["message"]["content"]) == "9 7"
        assert streamed.headers["x-snapcap-ignored"] == whole.headers["x-snapcap-ignored"] == "images, text"
        assert last["warnings"] == whole.json()["warnings"]
        assert last["warnings"][0].startswith("Ignored: images, text.")


def test_options_reach_the_engine_by_their_names_here_and_by_ours(client: TestClient, engine, picture) -> None:
    def params(**given: Any) -> Any:
        reply = client.post("/api/generate", json={"images": [picture(5)], "stream": False, "options": given})
        assert reply.status_code == 200, reply.text
        return engine.requests[-1].params

    asked = params(num_predict=3, temperature=0.5, seed=4, top_k=5, top_p=0.9, repeat_penalty=1.05)
    assert (asked.max_new_tokens, asked.temperature, asked.seed) == (3, 0.5, 4)
    assert (asked.top_k, asked.top_p, asked.repetition_penalty) == (5, 0.9, 1.05)
    assert params(num_predict=3, max_new_tokens=4).max_new_tokens == 4
    assert params(top_p=0).top_p == 0
    for unbound in (-1, -2, 0, -2.0, None):
        assert params(num_predict=unbound).max_new_tokens is None
    # More than the model holds is as much as it holds: clients send such bounds to any model.
    assert params(num_predict=4096).max_new_tokens == 4096
    assert set(OPTIONS) > {"num_beams", "max_chars", "trim_lead"}


def test_stop_sequences_end_a_caption(client: TestClient, picture) -> None:
    for stop in (" 7", ["\n\n", " 7"], ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "</s>", "[INST]", " 7"]):
        for stream in (True, False):
            asked = {"images": [picture(5)], "stream": stream, "options": {"stop": stop}}
            reply = client.post("/api/generate", json=asked)
            ended = lines(reply) if stream else [reply.json()]
            assert "".join(line["response"] for line in ended) == "5"
            assert ended[-1]["done_reason"] == "stop"
            assert all(type(ended[-1][count]) is int for count in COUNTS)
    for stop in ([""], ["a"] * 17):
        wrong = client.post("/api/generate", json={"images": [picture(5)], "options": {"stop": stop}})
        assert (wrong.status_code, "'options.stop'" in wrong.json()["error"]) == (422, True)


def test_options_that_clients_send_by_default_are_ignored_and_named(client: TestClient, picture) -> None:
    """Frigate sends a presence penalty to every model; Ollama ignores the options that it does not know."""
    sent = {"num_ctx": 8192, "presence_penalty": 0.3, "mirostat": 0, "min_p": 0.1, "tfs_z": 1, "num_gpu": 99}
    reply = client.post("/api/generate", json={"images": [picture(5)], "stream": False, "options": sent})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-snapcap-ignored"].split(", ") == list(sent)
    for name, value in {"num_beam": 2, "n": 2, "logit_bias": {"1": 2}}.items():
        refused = client.post("/api/generate", json={"images": [picture(5)], "options": {name: value}})
        assert (refused.status_code, f"'{name}'" in refused.json()["error"]) == (422, True)


def test_every_member_that_may_be_left_out(client: TestClient, picture) -> None:
    empty: dict[str, Any] = {
        "prompt": "",
        "suffix": "",
        "system": "",
        "template": "",
        "context": [],
        "format": "",
        "options": None,
        "think": False,
        "keep_alive": None,
        "tools": [],
    }
    reply = client.post("/api/generate", json={"images": [picture(5)], "stream": False, **empty})
    assert (reply.json()["response"], "x-snapcap-ignored" in reply.headers) == ("5 7", False)
    said = {"raw": True, "context": [1], "suffix": "x", "prompt": "What?", "system": "Be brief."}
    reply = client.post("/api/generate", json={"images": [picture(5)], "stream": False, **said})
    assert set(reply.headers["x-snapcap-ignored"].split(", ")) == {"raw", "context", "suffix", "text", "system"}
    thinks = client.post("/api/generate", json={"images": [picture(5)], "think": True})
    assert (thinks.status_code, "'think' is not supported" in thinks.json()["error"]) == (422, True)


@pytest.mark.usefixtures("conversing")
def test_a_model_that_reads_conversations_reads_the_system_message(client: TestClient, engine, picture) -> None:
    """PhotoPrism sends one beside the prompt."""
    asked = {"images": [picture(5)], "stream": False, "prompt": "What?", "system": "Be brief."}
    reply = client.post("/api/generate", json=asked)
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What?", "images": [picture(5)]},
    ]
    assert client.post("/api/chat", json={"messages": said, "stream": False}).status_code == 200
    for request in engine.requests:
        assert (request.prompt_ids, request.ahead) == ((1002, 1006, 1005), 2)
    assert "x-snapcap-ignored" not in reply.headers


@pytest.mark.parametrize("name", ["fake", "fake:latest", "", None])
def test_a_model_is_named_with_and_without_its_tag(client: TestClient, picture, name: str | None) -> None:
    asked = {"model": name, "images": [picture(5)], "stream": False}
    assert client.post("/api/generate", json=asked).json()["model"] == (name or "fake:latest")
    assert client.post("/api/show", json={"model": name or "fake"}).status_code == 200


def test_letter_case_and_space_around_a_name_may_differ_in_every_api(client: TestClient, picture) -> None:
    url = "data:image/png;base64," + picture(5)
    said = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
    for name in ("Fake", " FAKE:Latest "):
        for path, asked in {
            "/v1/caption": {"image": url},
            f"/models/{quote(name)}": {"inputs": url},
            "/v1/chat/completions": {"messages": said},
            "/v1/responses": {"input": said},
            "/api/generate": {"images": [url], "stream": False},
            f"/v2/models/{quote(name)}/infer": {
                "inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [url]}]
            },
        }.items():
            reply = client.post(path, json={"model": name, **asked})
            assert (reply.status_code, "5 7" in reply.text) == (200, True), (path, reply.text)
        assert client.get(f"/v1/models/{quote(name)}").json()["id"] == "fake"
    assert [meant("A", ("a", "A:latest")), meant("a", ("A", "b")), meant("c", ("A", "b"))] == ["A", "A", "c"]


def test_another_model_is_not_found(client: TestClient, picture) -> None:
    for name in ("other", "fake:7b", "fake:latest:latest", "latest", ":latest"):
        for path in ("/api/generate", "/api/show"):
            reply = client.post(path, json={"model": name, "images": [picture(5)]})
            assert reply.status_code == 404
            assert reply.json() == {"error": f"The model {name!r} is not served here; use 'fake'."}


def test_the_models_and_their_state(client: TestClient, services: Services) -> None:
    (listed,) = client.get("/api/tags").json()["models"]
    (loaded,) = client.get("/api/ps").json()["models"]
    assert listed["name"] == listed["model"] == loaded["model"] == "fake:latest"
    assert listed["digest"] == loaded["digest"]
    assert (listed["size"], listed["digest"]) == (0, "0" * 64)  # a fake engine has no weights
    services.captioner.files = WeightFiles(5, "a" * 64)
    (listed,) = client.get("/api/tags").json()["models"]
    assert (listed["size"], listed["digest"]) == (5, "a" * 64)
    assert datetime.fromisoformat(listed["modified_at"]) < datetime.fromisoformat(loaded["expires_at"])
    shown = client.post("/api/show", json={"name": "fake"}).json()
    assert shown["capabilities"] == ["completion", "vision"]
    assert shown["details"] == listed["details"]
    assert all(part.isdigit() for part in client.get("/api/version").json()["version"].split("."))
    for wrong in ({}, {"model": 5}, {"model": ""}):
        assert client.post("/api/show", json=wrong).status_code == 422


@pytest.mark.parametrize("keep_alive", [None, 0, -1, "5m", "0", "24h"])
def test_a_request_without_an_image_and_a_text_loads_the_model(client, engine, keep_alive) -> None:
    """The only model of a server without residency stays loaded, whatever keep_alive says."""
    for path, document in (
        ("/api/generate", {"prompt": ""}),
        ("/api/generate", {}),
        ("/api/chat", {"messages": []}),
        ("/api/chat", {}),
    ):
        reply = client.post(path, json={"model": "fake", "keep_alive": keep_alive, **document}).json()
        assert (reply["done"], reply["done_reason"], reply["model"]) == (True, "load", "fake")
        assert reply.get("response", reply.get("message", {}).get("content")) == ""
    assert engine.requests == []
    assert client.post("/api/generate", json={"model": "other"}).status_code == 404


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("", None),
        (0, 0),
        (2.5, 2.5),
        (-1, math.inf),
        (-0.5, math.inf),
        (10**400, math.inf),
        (-(10**400), math.inf),
        ("0", 0),
        ("-1", math.inf),
        ("300", 300),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("250ms", 0.25),
        ("-1m", math.inf),
        ("24h0m0s", 86400),
        ("999999999999h" * 7, math.inf),  # longer than the event loop can count
    ],
)
def test_keep_alive(value: Any, seconds: float | None) -> None:
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize(
    "value", ["m", "5 m", "5d", "1e3s", "٣m", "5m" * 60, True, [], {}, "5m\n", "--1", "9" * 20]
)
def test_what_is_no_duration_is_refused(client: TestClient, value: Any) -> None:
    with pytest.raises(InvalidOption):
        parse_keep_alive(value)
    reply = client.post("/api/generate", json={"keep_alive": value})
    assert (reply.status_code, "a duration such as" in reply.json()["error"]) == (422, True)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"prompt": "a text alone"}, "have no image"),
        ({"prompt": 5, "images": ["a"]}, "'prompt' must be text"),
        ({"images": "aGVsbG8="}, "'images' must be a list"),
        ({"images": [5]}, "images[0] must be base64"),
        ({"images": ["no!", "aGVsbG8="]}, "images[0] must be base64"),
        ({"images": ["https://example.com/a.png"]}, "images[0] must be base64"),
        ({"images": ["a"], "stream": "no"}, "'stream' must be true or false"),
        ({"images": ["a"], "options": [5]}, "'options' must be an object"),
        ({"images": ["a"], "options": {"num_predict": 1.5}}, "'num_predict' must be a whole number"),
        ({"images": ["a"], "options": {"temperature": 3}}, "'temperature' must be a number"),
        ({"images": ["a"], "model": 5}, "'model' must be text"),
        ({"images": ["a"], "num_beam": 2}, "did you mean num_beams"),
        ({"images": ["a"], "logprobs": True}, "'logprobs' is not supported"),
        ({"images": ["a"], "num_predict": 5}, "'num_predict' is not read here; put it into options"),
        ({"images": ["a"], "stop": ["a"]}, "'stop' is not read here; put it into options"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(client: TestClient, picture, document: dict[str, Any], says: str) -> None:
    if document.get("images") == ["a"]:
        document = {**document, "images": [picture(5)]}
    reply = client.post("/api/generate", json=document)
    assert (reply.status_code, list(reply.json())) == (422, ["error"])
    assert says in reply.json()["error"]


@pytest.mark.parametrize(
    "messages",
    [
        "a text",
        ["a text"],
        [{"role": "user", "content": "no image"}],
        [{"role": "somebody", "images": ["a"]}],
        [{"role": "user", "content": [{"type": "text", "text": "parts"}], "images": ["a"]}],
        [{"role": "user", "images": {"a": 1}}],
    ],
)
def test_messages_that_are_none(client: TestClient, messages: Any) -> None:
    reply = client.post("/api/chat", json={"messages": messages})
    assert (reply.status_code, list(reply.json())) == (422, ["error"])


def test_an_error_after_the_first_line_is_the_last_line(
    client: TestClient, engine, picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from snapcap.service.captioning.stream import CaptionStream

    take = CaptionStream._take

    def fails(stream: CaptionStream, token: int | None) -> str:
        if stream.tokens:
            raise EngineFailed
        return take(stream, token)

    monkeypatch.setattr(CaptionStream, "_take", fails)
    first, last = lines(client.post("/api/generate", json={"images": [picture(5)]}))
    assert first["response"] == "5"
    assert list(last) == ["error"]
    assert "its log has the cause" in last["error"]


def test_the_prompt_is_the_beginning_where_texts_are(services: Services, engine, picture) -> None:
    app = create_app(services, BodyLimits(1 << 20, 5.0), HttpSettings(chat_text="continue"))
    client = TestClient(app)
    asked = {"images": [picture(5)], "prompt": "a red", "system": "Be brief.", "stream": False}
    reply = client.post("/api/generate", json=asked)
    assert (reply.json()["response"], engine.requests[-1].prompt_ids) == (" 5 7", (1001, 1003))
    assert reply.headers["x-snapcap-ignored"] == "system"
    assert reply.json()["prompt_eval_count"] == 2
    message = {"role": "user", "content": "a", "images": [picture(5)]}
    assert client.post("/api/chat", json={"messages": [message], "stream": False}).status_code == 200
    assert engine.requests[-1].prompt_ids == (1001,)
    assert client.post("/api/chat", json={"messages": [message, message]}).status_code == 422
    several = client.post("/api/chat", json={"messages": [{**message, "images": [picture(5), picture(9)]}]})
    assert several.headers["x-snapcap-ignored"] == "images"
    assert "".join(line["message"]["content"] for line in lines(several)) == " 9 7"
