"""Streamed chat completions over a real port, with a device thread that the test plays."""

import base64
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI
from support.servers.live_app import create_app, on_a_port

from snapcap.service.api.app import Services
from snapcap.service.engine.request import CaptionRequest, Completion
from snapcap.service.http.bodies import BodyLimits
from snapcap.service.limits import QueueFull

PATIENCE = 30.0


@pytest.fixture
def client(services: Services, engine) -> Iterator[OpenAI]:
    engine.gate.clear()  # the test generates the tokens
    with (
        on_a_port(create_app(services, BodyLimits(1 << 20, 5.0))) as url,
        OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=PATIENCE) as client,
    ):
        yield client


def request(image: Callable[..., bytes]) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(image(5)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    return {"model": "fake", "messages": [{"role": "user", "content": parts}], "stream": True}


def begin(client: OpenAI, engine, image: Callable[..., bytes]) -> tuple[Any, CaptionRequest]:
    """A stream whose first token, 1, is there."""
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(lambda: client.chat.completions.create(**request(image)))
        assert engine.submitted.wait(PATIENCE)
        (sent,) = engine.requests
        assert sent.on_token is not None
        assert not opened.done()
        sent.on_token(1)
        return opened.result(PATIENCE), sent


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def in_flight(services: Services) -> float | None:
    return services.registry.get_sample_value("snapcap_requests_in_flight")


def rejected(services: Services, reason: str) -> float | None:
    return services.registry.get_sample_value("snapcap_requests_rejected_total", {"reason": reason})


def test_each_token_is_with_the_client_before_the_next_is_generated(
    client: OpenAI, services: Services, engine, image
) -> None:
    stream, sent = begin(client, engine, image)
    assert stream.response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.response.headers["x-request-id"]
    assert stream.response.headers["cache-control"] == "no-cache"
    assert next(stream).choices[0].delta.role == "assistant"
    assert next(stream).choices[0].delta.content == "1"
    for token in (2, 3):
        sent.on_token(token)
        assert next(stream).choices[0].delta.content == f" {token}"
    assert not sent.future.done()
    sent.future.set_result(Completion((1, 2, 3), "length", "eager", 0, 0, 0))
    assert next(stream).choices[0].finish_reason == "length"
    assert list(stream) == []
    until(lambda: in_flight(services) == 0)
    assert services.registry.get_sample_value("snapcap_requests_total", {"api": "openai", "code": "200"}) == 1
    assert "first_caption" in services.timeline.marks()


def test_a_stream_names_what_was_ignored_in_its_last_chunk(client: OpenAI, engine, image) -> None:
    engine.gate.set()
    asked = request(image)
    asked["messages"][0]["content"].append({"type": "text", "text": "What is this?"})
    *before, last = client.chat.completions.create(**asked)
    (warning,) = last.model_extra["warnings"]
    assert warning == "Ignored: text. This model takes no instructions or questions."
    assert not any("warnings" in (chunk.model_extra or {}) for chunk in before)


def test_a_client_that_leaves_a_stream_frees_its_slot(client: OpenAI, services: Services, engine, image) -> None:
    stream, sent = begin(client, engine, image)
    next(stream)
    assert not sent.future.cancelled()
    stream.close()
    until(sent.future.cancelled)
    until(lambda: in_flight(services) == 0)
    assert rejected(services, "client_disconnected") == 1


def test_a_client_that_leaves_before_the_first_token_does_too(
    client: OpenAI, services: Services, engine, image
) -> None:
    while not engine.requests:  # a server without CPU time may not have come so far
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.5).chat.completions.create(**request(image))
    until(engine.requests[0].future.cancelled)
    until(lambda: in_flight(services) == 0)


def test_a_failure_in_the_middle_is_an_event_and_the_last(
    client: OpenAI, services: Services, engine, image, caplog
) -> None:
    stream, sent = begin(client, engine, image)
    sent.future.set_exception(RuntimeError("secret path /srv/x"))
    with pytest.raises(openai.APIError, match="its log has the cause") as failed:
        list(stream)
    assert (failed.value.code, failed.value.type) == ("internal_error", "server_error")
    assert "secret path" in caplog.text
    until(lambda: in_flight(services) == 0)


def test_what_fails_before_the_first_token_has_its_status(client: OpenAI, engine, image) -> None:
    engine.refuse = QueueFull(9)
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(**request(image))
    assert (refused.value.type, refused.value.response.headers["retry-after"]) == ("rate_limit_error", "9")
    engine.refuse, engine.fail = None, RuntimeError("broken")
    engine.gate.set()
    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(**request(image))
    assert failed.value.code == "internal_error"


def test_the_client_retries_what_passes(services: Services, client: OpenAI, engine, image) -> None:
    engine.gate.set()
    engine.refuse = QueueFull(0)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(
            lambda: client.with_options(max_retries=5).chat.completions.create(**request(image) | {"stream": False})
        )
        until(
            lambda: (
                (
                    services.registry.get_sample_value("snapcap_requests_rejected_total", {"reason": "queue_full"})
                    or 0
                )
                >= 1
            )
        )
        engine.refuse = None
        assert reply.result(PATIENCE).choices[0].message.content == "5 7"
