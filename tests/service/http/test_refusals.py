"""Overload, not ready, deadline, failures, slow bodies and clients that leave."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.fakes.list_engine import PATIENCE
from support.fakes.passing_time import pass_on_loop
from support.fakes.thread_decoder import attach
from support.servers.live_app import create_app

from snapcap.models.processing.transform import ImageTransform
from snapcap.service.api.app import Services
from snapcap.service.errors import DeadlineExceeded
from snapcap.service.http.bodies import BodyLimits
from snapcap.service.limits import QueueFull

Png = Callable[..., bytes]


def metric(services: Services, name: str, **labels: str) -> float | None:
    return services.registry.get_sample_value(name, labels)


def test_not_ready_names_the_phase(make_services, new_client, image: Png) -> None:
    services = make_services()
    with services.timeline.phase("load_weights"):
        reply = new_client(services).post("/v1/caption", content=image())
    assert reply.status_code == 503
    assert reply.json()["phase"] == "load_weights"
    assert reply.json()["code"] == "not_ready"
    assert int(reply.headers["retry-after"]) >= 1
    assert metric(services, "snapcap_requests_rejected_total", reason="not_ready") == 1


def test_a_failed_process_refuses(client: TestClient, services: Services, image: Png) -> None:
    services.readiness.fail("the device is gone")
    assert client.post("/v1/caption", content=image()).json()["phase"] == "failed"


def test_a_draining_process_still_serves(client: TestClient, services: Services, image: Png) -> None:
    services.readiness.drain()
    assert client.post("/v1/caption", content=image()).status_code == 200


def test_overload_carries_retry_after(client: TestClient, services: Services, engine, image: Png) -> None:
    engine.refuse = QueueFull(7.4)
    reply = client.post("/v1/caption", content=image())
    assert (reply.status_code, reply.headers["retry-after"], reply.json()["code"]) == (429, "7", "queue_full")
    assert metric(services, "snapcap_requests_rejected_total", reason="queue_full") == 1
    engine.refuse = None
    assert client.post("/v1/caption", content=image()).status_code == 200


def test_captions_fail_as_a_whole_when_every_image_was_refused(client: TestClient, engine, image: Png) -> None:
    engine.refuse = QueueFull(3)
    reply = client.post("/v1/captions", files=[("image", ("a", image())), ("image", ("b", image()))])
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "3")


def test_deadline(make_services, serve_with, new_client, engine, image: Png) -> None:
    services = serve_with(make_services(timeout=PATIENCE))
    engine.takes_s = PATIENCE
    engine.gate.clear()
    reply = new_client(services).post("/v1/caption", content=image())
    assert (reply.status_code, reply.json()["code"]) == (504, "deadline_exceeded")
    assert engine.requests[0].future.cancelled()
    assert metric(services, "snapcap_requests_rejected_total", reason="deadline_exceeded") == 1


def test_the_engine_may_report_the_deadline_first(client: TestClient, engine, image: Png) -> None:
    engine.fail = DeadlineExceeded()
    assert client.post("/v1/caption", content=image()).status_code == 504


def test_an_unknown_failure_is_one_fixed_sentence(
    client: TestClient, engine, image: Png, caplog: pytest.LogCaptureFixture
) -> None:
    engine.fail = RuntimeError("secret path /srv/x")
    with caplog.at_level(logging.ERROR, "snapcap.access"):
        reply = client.post("/v1/caption", content=image(), headers={"X-Request-Id": "abc"})
        several = client.post("/v1/captions", files=[("image", ("a", image()))])
    assert (reply.status_code, reply.json()["code"]) == (500, "internal_error")
    assert "secret" not in reply.text + several.text
    assert several.json()["captions"][0]["status"] == 500
    assert "secret path /srv/x" in caplog.text
    assert caplog.records[0].fields == {"request_id": "abc"}
    engine.fail = None
    assert client.post("/v1/caption", content=image()).status_code == 200


@pytest.mark.parametrize("identity", ["abc-123", "x" * 128])
def test_a_request_id_is_kept(client: TestClient, identity: str) -> None:
    for path in ("/livez", "/nowhere"):
        assert client.get(path, headers={"X-Request-Id": identity}).headers["x-request-id"] == identity


@pytest.mark.parametrize("identity", ["", "x" * 129, "a b", b"\xe9"])
def test_a_bad_request_id_is_replaced(client: TestClient, identity: str | bytes) -> None:
    made = client.get("/livez", headers={b"X-Request-Id": identity}).headers["x-request-id"]
    assert len(made) == 32
    assert made != client.get("/livez").headers["x-request-id"]


class Connection:
    """One ASGI request whose body arrives as the test says."""

    def __init__(self, services: Services, **headers: str) -> None:
        self.app = create_app(services, BodyLimits(1000, PATIENCE))
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.received = 0
        self.sent: list[dict[str, Any]] = []
        self.headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]

    async def run(self) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/caption",
            "raw_path": b"/v1/caption",
            "query_string": b"",
            "headers": self.headers,
        }
        await self.app(scope, self.receive, self.send)

    async def receive(self) -> dict[str, Any]:
        message = await self.incoming.get()
        self.received += 1
        return message

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def body(self, data: bytes, more: bool) -> None:
        self.incoming.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def leave(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def problem(self) -> dict[str, Any]:
        return json.loads(self.sent[1]["body"])


def test_a_stalled_body_times_out_and_closes_the_connection(services: Services) -> None:
    async def scenario() -> Connection:
        connection = Connection(services)
        connection.body(b"\x89PNG", more=True)
        running = asyncio.create_task(connection.run())
        while not connection.received:  # noqa: ASYNC110  a number tells nobody
            await asyncio.sleep(0)
        pass_on_loop(PATIENCE)
        await running
        return connection

    connection = asyncio.run(scenario())
    assert (connection.status, connection.problem["code"]) == (408, "body_timeout")
    assert (b"connection", b"close") in connection.sent[0]["headers"]
    assert "4 bytes" in connection.problem["detail"]


def test_an_announced_length_is_refused_before_a_byte_is_read(services: Services) -> None:
    async def scenario() -> Connection:
        connection = Connection(services, content_length="1001")
        await connection.run()
        return connection

    connection = asyncio.run(scenario())
    assert (connection.status, connection.received) == (413, 0)


def test_a_growing_body_is_refused_at_the_limit(services: Services) -> None:
    async def scenario() -> Connection:
        connection = Connection(services)
        for _ in range(4):
            connection.body(b"x" * 400, more=True)
        await connection.run()
        return connection

    connection = asyncio.run(scenario())
    assert (connection.status, connection.received) == (413, 3)


def test_a_server_that_is_not_ready_reads_no_body(make_services) -> None:
    async def scenario() -> Connection:
        connection = Connection(make_services())
        await connection.run()
        return connection

    connection = asyncio.run(scenario())
    assert (connection.status, connection.received) == (503, 0)


def test_a_client_that_leaves_withdraws_its_request(services: Services, engine, image: Png) -> None:
    engine.gate.clear()

    async def scenario() -> Connection:
        connection = Connection(services)
        connection.body(image(), more=False)
        running = asyncio.create_task(connection.run())
        await asyncio.to_thread(engine.submitted.wait)
        connection.leave()
        await running
        return connection

    connection = asyncio.run(scenario())
    assert connection.status == 499
    assert engine.requests[0].future.cancelled()
    assert metric(services, "snapcap_requests_rejected_total", reason="client_disconnected") == 1
    assert metric(services, "snapcap_requests_in_flight") == 0


def test_a_client_that_leaves_during_its_upload(services: Services, engine) -> None:
    async def scenario() -> Connection:
        connection = Connection(services)
        connection.body(b"\x89PNG", more=True)
        connection.leave()
        await connection.run()
        return connection

    assert asyncio.run(scenario()).problem["code"] == "client_disconnected"
    assert engine.requests == []


def test_images_that_wait_to_be_decoded_are_bounded(make_services, serve_with, engine, image: Png) -> None:
    services = serve_with(make_services(queue_size=1))
    blocked, release = asyncio.Event(), asyncio.Event()

    async def scenario() -> tuple[Connection, Connection]:
        loop = asyncio.get_running_loop()
        transform = ImageTransform(size=(8, 8))
        gate = asyncio.run_coroutine_threadsafe

        class Slow:
            def decode(self, data: bytes, room: int | None) -> Any:
                loop.call_soon_threadsafe(blocked.set)
                gate(release.wait(), loop).result()
                return transform.decode(data)

        attach(services.captioner, engine, Slow())
        first, second = Connection(services), Connection(services)
        first.body(image(6), more=False)
        running = asyncio.create_task(first.run())
        await blocked.wait()
        await second.run()
        release.set()
        await running
        return first, second

    first, second = asyncio.run(scenario())
    assert (second.status, second.received) == (429, 0)
    assert (first.status, first.problem["caption"]) == (200, "6 7")


def test_a_cancelled_request_is_counted_and_cancels_its_work(services: Services, engine, image: Png) -> None:
    engine.gate.clear()

    async def scenario() -> None:
        connection = Connection(services)
        connection.body(image(), more=False)
        running = asyncio.create_task(connection.run())
        await asyncio.to_thread(engine.submitted.wait)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    assert engine.requests[0].future.cancelled()
    assert metric(services, "snapcap_requests_total", api="caption", code="499") == 1
    assert metric(services, "snapcap_requests_in_flight") == 0
