"""Replies of a task whose answers name parts of the image: where the parts are, in which pixels, and where not."""

import base64
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient
from support.fakes.thread_decoder import PLAIN_CONFIG

from snapcap.models.text import Region
from snapcap.service.api.app import Services
from snapcap.service.captioning.model_defaults import Answer, ModelDefaults, Resolved

PARTS = {"label": "all", "box": [0, 0, 30, 20]}, {"label": "7", "box": [0, 0, 30, 20], "polygons": [[0, 0, 30, 20]]}
REGIONS = [*PARTS]


class Naming(ModelDefaults):
    """Names the whole image, once as a box and once by its outline and the last token."""

    def answer(self, resolved: Resolved, tokens: Sequence[int], size: tuple[int, int]) -> Answer:
        text, _ = super().answer(resolved, tokens, size)
        return Answer(
            text, [Region("all", (0, 0, *size)), Region(str(tokens[-1]), (0, 0, *size), ((0, 0, *size),))]
        )


@pytest.fixture
def client(services: Services, new_client: Callable[[Services], TestClient]) -> TestClient:
    model: Any = services.captioner._model
    naming = Naming(model.defaults.tokenizer(None), PLAIN_CONFIG)
    services.captioner.attach(model.engine, "fake", model.image_decoder, naming)
    return new_client(services)


@pytest.fixture
def on_its_side() -> bytes:
    """A PNG of 20×30 pixels that is 30×20 upright."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 8
    Image.new("RGB", (20, 30), (5, 0, 0)).save(file, "PNG", exif=exif)
    return file.getvalue()


def test_a_reply_has_regions_in_pixels_of_the_upright_image(
    client: TestClient, on_its_side: bytes, check: Callable[[object, str], None]
) -> None:
    reply = client.post("/v1/caption", content=on_its_side).json()
    check(reply, "Caption")
    assert (reply["caption"], reply["regions"]) == ("5 7", REGIONS)
    several = client.post(
        "/v1/captions", files=[("images", ("a.png", on_its_side)), ("images", ("b", b"no"))]
    ).json()
    check(several, "Captions")
    assert [item.get("regions") for item in several["captions"]] == [REGIONS, None]


def test_a_stream_has_its_regions_in_the_last_event(client: TestClient, on_its_side: bytes) -> None:
    reply = client.post("/v1/caption", content=on_its_side, headers={"Accept": "text/event-stream"})
    *pieces, last = events(reply.text)
    assert last["regions"] == REGIONS
    assert not any("regions" in piece for piece in pieces)


@pytest.mark.parametrize("stop", [None, " 7"])
def test_a_chat_has_regions_beside_its_choices(
    client: TestClient, on_its_side: bytes, check: Callable[[object, str], None], stop: str | None
) -> None:
    url = f"data:image/png;base64,{base64.b64encode(on_its_side).decode()}"
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    body = {"messages": [message], "stop": stop}
    whole = client.post("/v1/chat/completions", json=body).json()
    check(whole, "ChatCompletion")
    assert whole["regions"] == REGIONS
    *chunks, last = events(client.post("/v1/chat/completions", json={**body, "stream": True}).text)
    check(last, "ChatCompletionChunk")
    assert last["regions"] == REGIONS
    assert not any("regions" in chunk for chunk in chunks)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_other_apis_have_the_text_alone(client: TestClient, on_its_side: bytes) -> None:
    assert client.post("/", content=on_its_side).json() == [{"generated_text": "5 7"}]
