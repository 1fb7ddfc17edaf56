"""The queue of a server as its clients meet it: `--queue-size` requests wait, wherever they are, and one more is
refused before its body is read."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.fakes.list_engine import PATIENCE, Served
from support.fakes.thread_decoder import attach
from support.servers.bounded_server import BoundedServer, reply, until
from support.servers.queue_places import (
    PLACES,
    Slow,
    captions,
    chat,
    depth,
    form,
    is_refused_before_its_body,
    tensor,
)
from support.servers.raw_http import post

from snapcap.models.processing.transform import ImageTransform
from snapcap.service.api.app import Services
from snapcap.service.api.image_fetcher import ImageFetcher
from snapcap.service.limits import EngineChannelFull, ImageMemoryFull

Png = Callable[..., bytes]


def rejected(services: Services, reason: str) -> float | None:
    return services.registry.get_sample_value("snapcap_requests_rejected_total", {"reason": reason})


def test_bodies_on_their_way_keep_nobody_out(server: BoundedServer, clients, engine, image: Png) -> None:
    """However many: a place is for an image that is here. One that comes to a full queue is refused after all."""
    request = post("/v1/caption", image(5))
    coming = [clients() for _ in range(PLACES * 10)]
    for client in coming:
        client.sendall(request[:-1])
    captioned = clients()
    captioned.sendall(request)
    assert captions([captioned]) == ["5 7"]
    engine.gate.clear()
    for client in coming[:PLACES]:
        client.sendall(request[-1:])
    until(lambda: depth(server.services) == PLACES)
    is_refused_before_its_body(clients())
    coming[-1].sendall(request[-1:])
    status, body = reply(coming[-1])
    assert (status, json.loads(body)["code"]) == (429, "queue_full")
    engine.gate.set()
    assert captions(coming[:PLACES]) == ["5 7"] * PLACES
    assert depth(server.services) == 0


def test_images_that_threads_decode(server: BoundedServer, clients, engine, image: Png) -> None:
    slow, captioner = Slow(), server.services.captioner
    attach(captioner, engine, slow)
    waiting = [clients() for _ in range(PLACES)]
    for client in waiting:
        client.sendall(post("/v1/caption", image(5)))
    until(lambda: depth(server.services) == PLACES)
    assert slow.begun.wait(PATIENCE)
    is_refused_before_its_body(clients())
    slow.go_on.set()
    assert captions(waiting) == ["5 7"] * PLACES
    assert depth(server.services) == 0


def test_the_engine_of_this_process(server: BoundedServer, clients, image: Png) -> None:
    """What runs on the device does not wait: its place is another's."""
    served, captioner, steps = Served(), server.services.captioner, threading.Event()
    runner: Any = served.runner
    encode = runner.encode  # takes numbers for images: here the value of their pixels
    runner.encode = lambda bucket, images, first, rows: encode(
        bucket, [int(each[0, 0, 0]) for each in images], first, rows
    )
    runner.before_step = lambda: steps.wait(PATIENCE)
    attach(captioner, served.engine, ImageTransform(size=(8, 8)))
    request = post("/v1/caption?max_new_tokens=2", image(5))
    running, waiting = clients(), [clients() for _ in range(PLACES)]
    running.sendall(request)
    until(lambda: len(served.scheduler.running) == 1 and depth(server.services) == 0)
    for client in waiting:
        client.sendall(request)
    until(lambda: served.scheduler.depth == depth(server.services) == PLACES)
    is_refused_before_its_body(clients())
    steps.set()
    assert captions([running, *waiting]) == ["500 501"] * (1 + PLACES)
    assert depth(server.services) == 0
    served.engine.stop()
    served.thread.join(PATIENCE)


def test_who_is_refused_finds_which_limit_it_was(
    server: BoundedServer, clients, engine, image: Png, caplog: pytest.LogCaptureFixture
) -> None:
    """In the reply, in the log's line and in the metric."""
    services = server.services
    client = clients()
    for refusal, code in (
        (EngineChannelFull(), "engine_channel_full"),
        (ImageMemoryFull(), "image_memory_full"),
    ):
        engine.refuse = refusal
        with caplog.at_level(logging.INFO, "snapcap.access"):
            caplog.clear()
            client.sendall(post("/v1/caption", image(5)))
            status, body = reply(client)
            until(lambda: bool(caplog.records))
        assert (status, json.loads(body)["code"]) == (429, code)
        assert json.loads(body)["type"] == f"urn:snapcap:problem:{code}"
        (record,) = caplog.records
        assert record.fields["code"] == code  # type: ignore[attr-defined]
        assert rejected(services, code) == 1
    assert rejected(services, "queue_full") == 0
    engine.refuse = None
    caplog.clear()
    with caplog.at_level(logging.INFO, "snapcap.access"):
        client.sendall(post("/v1/caption", image(5)))
        assert reply(client)[0] == 200
        until(lambda: bool(caplog.records))
    assert "code" not in caplog.records[0].fields  # type: ignore[attr-defined]


def test_an_image_fetched_from_a_url_has_its_place_once_it_is_here(
    server: BoundedServer, clients, image: Png, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFetcher, "fetch", lambda *_: asyncio.sleep(PATIENCE))
    fetching = clients()
    fetching.sendall(chat(image(5), url="https://example.com/a.png"))
    until(lambda: server.services.registry.get_sample_value("snapcap_requests_in_flight") == 1)
    assert depth(server.services) == 0


def test_images_without_a_place(server: BoundedServer, clients, engine, image: Png) -> None:
    """Of a tensor all have theirs or none has; of a form each has its own, and its own answer."""
    engine.gate.clear()
    waiting, tensors, forms = clients(), clients(), clients()
    waiting.sendall(post("/v1/caption", image(5)))
    until(lambda: len(engine.requests) == 1)
    tensors.sendall(tensor(image(1), image(2)))
    assert reply(tensors)[0] == 429
    assert depth(server.services) == len(engine.requests) == 1, "none of them has begun"
    forms.sendall(form(image(1), image(2)))
    until(lambda: len(engine.requests) == 2)
    engine.gate.set()
    status, body = reply(forms)
    first, second = json.loads(body)["captions"]
    assert (status, first["caption"], second["code"]) == (200, "1 7", "queue_full")
    assert captions([waiting]) == ["5 7"]


def test_who_is_not_ready_says_so_before_the_queue_is_asked(make_services, new_client, image: Png) -> None:
    services = make_services(queue_size=1)
    services.captioner._admission.admit().take()
    assert new_client(services).post("/v1/caption", content=image()).status_code == 503
