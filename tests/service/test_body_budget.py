"""The memory and the time of bodies: what is held together, for how long, and when it is given back."""

import asyncio
import base64
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request
from support.fakes.thread_decoder import attach
from support.servers.bounded_server import BoundedServer, reply, rest, until

from snapcap.models.processing.transform import ImageTransform
from snapcap.service.config.settings import HttpLimits
from snapcap.service.http.bodies import MIN_BYTES_PER_S, BodyClock, BodyLimits, read_json
from snapcap.service.limits import BodyMemoryFull
from snapcap.service.memory import BodyBudget, body_account, open_account
from snapcap.service.server.http_process import body_limits

MIB = 1 << 20
Png = Callable[..., bytes]


def head(length: int, kind: str = "image/png") -> bytes:
    return (
        f"POST /v1/caption HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def limits(budget: BodyBudget, **others: float) -> BodyLimits:
    return BodyLimits(others.pop("max_bytes", MIB), others.pop("timeout", 30.0), budget=budget, **others)


async def held(budget: BodyBudget, count: int) -> None:
    while budget.held != count:  # noqa: ASYNC110  it tells nobody
        await asyncio.sleep(0.01)


def test_a_body_that_waits_for_a_thread_is_counted_when_nobody_waits_for_it(image: Png) -> None:
    """It is there until a thread has taken it."""
    budget, size, go_on = BodyBudget(MIB), 100_000, threading.Event()

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": bytes(size), "more_body": False}

    async def scene() -> None:
        request = Request({"type": "http", "headers": [], "state": {}}, receive)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(go_on.wait, 30)
            task = asyncio.create_task(read_json(request, replace(limits(budget), pool=pool), len))
            await held(budget, 2 * size)
            task.cancel()
            await asyncio.wait([task])
            account = body_account(request.scope)
            assert account is not None
            account.release()  # as the request does that is over
            assert budget.held == 2 * size
            go_on.set()
            await held(budget, 0)

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_bodies_that_are_not_complete_are_counted_together(services, image: Png) -> None:
    budget = BodyBudget(4 * MIB)
    with BoundedServer(services, bodies=limits(budget)) as server, ExitStack() as exits:
        clients = [exits.enter_context(server.connect()) for _ in range(8)]
        for client in clients[:4]:
            client.sendall(head(MIB) + bytes(MIB - 1))
        until(lambda: budget.held == 4 * (MIB - 1))
        idle = server.connect()
        idle.sendall(head(MIB))  # announced is not held
        answers = []
        for client in clients[4:]:
            client.sendall(head(100_000) + bytes(50_000))
            answers.append(reply(client))
        assert [status for status, _ in answers] == [429] * 4
        problem = json.loads(answers[0][1])
        assert problem["code"] == "body_memory_full"
        assert str(4 * MIB) in problem["detail"]
        count = server.services.registry.get_sample_value
        assert count("snapcap_requests_rejected_total", {"reason": "body_memory_full"}) == 4
        assert budget.held == 4 * (MIB - 1)
        for client in clients[:4]:
            client.sendall(b"!")
            assert reply(client)[0] == 422
        until(lambda: budget.held == 0)
        idle.close()
        with server.connect() as good:
            good.sendall(head(len(image(5))) + image(5))
            assert reply(good)[0] == 200


def test_clients_that_leave_give_it_back(services) -> None:
    budget = BodyBudget(4 * MIB)
    with BoundedServer(services, bodies=limits(budget)) as server:
        for _ in range(2):
            with ExitStack() as exits:
                for _ in range(3):
                    exits.enter_context(server.connect()).sendall(head(MIB) + bytes(MIB - 1))
                until(lambda: budget.held == 3 * (MIB - 1))
            until(lambda: budget.held == 0)


def test_one_that_is_alone_may_take_what_one_may_take(services, image: Png) -> None:
    budget = BodyBudget(1)
    with BoundedServer(services, bodies=limits(budget)) as server, server.connect() as client:
        data = image(5) + bytes(500_000)
        body = json.dumps({"image": base64.b64encode(data).decode()}).encode()
        for kind, content in (("image/png", data), ("application/json", body)):
            client.sendall(head(len(content), kind) + content)
            status, answer = reply(client)
            assert (status, json.loads(answer)["caption"]) == (200, "5 7")
        assert budget.held == 0


@pytest.mark.parametrize("form", ["json", "multipart"])
def test_a_form_counts_twice_while_it_is_parsed(services, form: str) -> None:
    budget = BodyBudget(int(2.2 * MIB))
    content = {
        "json": (b'{"image": "' + b"A" * 700_000 + b'"}', "application/json"),
        "multipart": (
            b'--B\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
            + bytes(700_000)
            + b"\r\n--B--",
            "multipart/form-data; boundary=B",
        ),
    }
    body, kind = content[form]
    with BoundedServer(services, bodies=limits(budget)) as server, ExitStack() as exits:
        other, client = (exits.enter_context(server.connect()) for _ in range(2))
        other.sendall(head(MIB) + bytes(MIB - 1))
        until(lambda: budget.held == MIB - 1)
        client.sendall(head(len(body), kind) + body)
        assert reply(client)[0] == 429
        until(lambda: budget.held == MIB - 1)
        other.close()
        until(lambda: budget.held == 0)
        client.sendall(head(len(body), kind) + body)
        assert reply(client)[0] == 422  # no image, but it was looked at
        until(lambda: budget.held == 0)


def test_an_image_is_held_until_it_is_decoded_although_its_client_has_left(services, engine, image: Png) -> None:
    decoding, release = threading.Event(), threading.Event()
    transform = ImageTransform(size=(8, 8))

    class Slow:
        def decode(self, data: bytes, *rest: Any) -> Any:
            decoding.set()
            release.wait(30)
            return transform.decode(data, *rest)

    attach(services.captioner, engine, Slow())
    budget, data = BodyBudget(), image(5) + bytes(500_000)
    with BoundedServer(services, bodies=limits(budget)) as server:
        with server.connect() as client:
            client.sendall(head(len(data)) + data)
            assert decoding.wait(30)
        metric = "snapcap_requests_in_flight"
        until(lambda: services.registry.get_sample_value(metric) == 0)
        assert budget.held == len(data)
        release.set()
        until(lambda: budget.held == 0)


def test_accounts() -> None:
    budget = BodyBudget(100)
    first, second = open_account({}, budget), open_account({}, budget)
    first.take(60)
    with pytest.raises(BodyMemoryFull, match="100"):
        second.take(41)
    second.take(40)
    first.hold().release()
    assert budget.held == 100
    first.release()
    assert budget.held == 40
    second.take(60)
    second.take(1000)  # nobody else holds anything
    second.give_back(1050)
    second.release()
    assert budget.held == 0


def test_the_share_is_of_the_memory_that_there_is(services, monkeypatch) -> None:
    monkeypatch.setattr("snapcap.service.memory.memory_limit", lambda: 4 << 30)
    chosen = body_limits(HttpLimits(body_total_timeout=7.0), 1, services.metrics)
    assert chosen.budget.limit == 256 * MIB
    assert chosen.total_timeout == 7.0
    assert services.registry.get_sample_value("snapcap_body_memory_limit_bytes") == 256 * MIB
    given = body_limits(HttpLimits(max_body_memory=5), 1, services.metrics)
    given.budget.add(3, 0)
    assert services.registry.get_sample_value("snapcap_body_memory_bytes") == 3


# Time


@pytest.mark.parametrize(("rate", "arrives"), [(0.5, False), (1.1, True), (100, True)])
def test_a_body_must_keep_its_pace(services, rate: float, arrives: bool) -> None:
    async def scenario() -> bool:
        loop = asyncio.get_running_loop()
        now = loop.time()
        loop.time = lambda: now  # type: ignore[method-assign]
        clock = BodyClock(BodyLimits(20 * MIB, 10.0))
        for _ in range(60):
            now += 1
            if now > clock.end:
                return False
            clock.received(int(rate * MIN_BYTES_PER_S))
        return True

    assert run_apart(scenario) is arrives


def test_bytes_that_came_early_earn_no_time_for_later() -> None:
    async def scenario() -> list[float]:
        loop = asyncio.get_running_loop()
        now = start = loop.time()
        loop.time = lambda: now  # type: ignore[method-assign]
        clock = BodyClock(BodyLimits(20 * MIB, 10.0, 120.0))
        clock.received(20 * MIB - 1)
        ends = [clock.end - start]
        for _ in range(9):  # a byte now and then
            now += 1
            clock.received(1)
        ends.append(clock.end - start)
        for _ in range(200):
            now += 1
            clock.received(MIB)
        return [*ends, clock.end - start]

    assert run_apart(scenario) == pytest.approx([10, 10, 120], abs=0.01)


def run_apart(scenario: Callable[[], Any]) -> Any:
    """On a loop that nobody else has: its clock is the test's."""
    loop = asyncio.SelectorEventLoop()
    try:
        coroutine = scenario()
        asyncio.events._set_running_loop(loop)
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        finally:
            asyncio.events._set_running_loop(None)
        raise AssertionError("it waits")
    finally:
        loop.close()


def test_a_body_one_byte_short_does_not_stay(services) -> None:
    budget = BodyBudget()
    with BoundedServer(services, bodies=limits(budget, timeout=0.5)) as server, ExitStack() as exits:
        clients = [exits.enter_context(server.connect()) for _ in range(10)]
        for client in clients:
            client.sendall(head(MIB) + bytes(MIB - 1))
        for client in clients:
            answer = rest(client)  # waits less than the 32 s that it took when bytes that came early earned time
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"connection: close" in answer.lower()
        until(lambda: budget.held == 0)


def test_a_body_that_drips_for_ever_does_not_stay(services) -> None:
    given = limits(BodyBudget(), total_timeout=0.5)
    with BoundedServer(services, bodies=given) as server, server.connect() as client:
        client.sendall(head(MIB))
        client.settimeout(0.05)
        answer = b""
        for _ in range(400):
            try:
                client.sendall(b"x" * 1000)
                answer = client.recv(65536)
                break
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")
