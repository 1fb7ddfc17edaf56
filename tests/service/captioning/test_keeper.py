"""A captioner whose model may be absent: requests wake it, wait within their time limit, and count as its uses."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.fakes.list_engine import PATIENCE
from support.servers.queue_places import chat, generate

from snapcap.service.api import answers
from snapcap.service.api.app import Services
from snapcap.service.captioning.captioner import Captioner, CaptionJob, Start
from snapcap.service.captioning.options import CaptionOptions
from snapcap.service.captioning.times import CaptionTimes
from snapcap.service.errors import DeadlineExceeded, ModelNotAwake, ModelNotFound
from snapcap.service.limits import QueueFull
from snapcap.service.readiness import Readiness
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline

Attach = Callable[[Captioner], None]


class FakeKeeper:
    """A model that wakes when its gate is opened."""

    def __init__(self, captioner: Captioner, attach: Attach) -> None:
        self.state = "absent"
        self.created = 1.0
        self.start = Start(Readiness(lambda: "fake"), Timeline(time.monotonic()), StartupStatus())
        self.gate = asyncio.Event()
        self.reason = ""
        self.asked = 0
        self._captioner = captioner
        self._attach = attach

    def check(self) -> None:
        pass

    async def wake(self) -> None:
        self.asked += 1
        await self.gate.wait()
        if self.reason:
            raise ModelNotAwake("first", self.reason)
        self.state = "ready"
        self._attach(self._captioner)


@pytest.fixture
def attach(services: Services) -> Attach:
    """Gives a captioner the fake model of `services`."""
    fake: Any = services.captioner._model

    def put(captioner: Captioner) -> None:
        captioner.attach(fake.engine, str(captioner.model_name), fake.image_decoder, fake.defaults)

    return put


@pytest.fixture
def two(make_services: Callable[..., Services], attach: Attach) -> dict[str, tuple[Captioner, FakeKeeper]]:
    found = {}
    for name in ("first", "second"):
        captioner = make_services(queue_size=2, timeout=PATIENCE).captioner
        found[name] = (captioner, FakeKeeper(captioner, attach))
    captioners = {name: captioner for name, (captioner, _) in found.items()}
    for name, (captioner, keeper) in found.items():
        captioner.join(name, keeper, captioners)
    return found


async def caption(captioner: Captioner, image: bytes, **options: Any) -> str:
    with captioner.admit() as permit:
        named = captioner.named(options.get("model"), permit)
        permit.take()
        return (
            await named.caption(image, CaptionOptions(**options), CaptionJob("id", permit, CaptionTimes()))
        ).model


def test_requests_wait_for_the_model_that_they_name(two, image) -> None:
    (first, keeper), (second, other) = two["first"], two["second"]

    async def run() -> None:
        keeper.gate, other.gate = asyncio.Event(), asyncio.Event()
        waiting = [asyncio.ensure_future(caption(first, image())) for _ in range(2)]
        other.gate.set()
        assert await caption(first, image(), model="second") == "second"  # the first still sleeps
        assert not any(each.done() for each in waiting)
        assert (first.uses.count, second.uses.count) == (2, 0)
        keeper.gate.set()
        assert await asyncio.gather(*waiting) == ["first", "first"]
        assert (first.uses.count, first.state) == (0, "ready")

    asyncio.run(run())


def test_a_model_that_cannot_wake_refuses_its_own_requests_with_the_reason(two, image) -> None:
    (first, keeper), (_, other) = two["first"], two["second"]

    async def run() -> None:
        keeper.gate, other.gate = asyncio.Event(), asyncio.Event()
        keeper.reason = "the weights are gone"
        keeper.gate.set()
        other.gate.set()
        with pytest.raises(ModelNotAwake) as refused:
            await caption(first, image())
        assert "'first' cannot wake: the weights are gone" in refused.value.detail
        assert (refused.value.status, refused.value.code) == (503, "not_ready")
        assert first.uses.count == 0
        assert await caption(first, image(), model="second") == "second"

    asyncio.run(run())


def test_a_request_waits_no_longer_than_it_may(two, image) -> None:
    first, keeper = two["first"]

    async def run() -> None:
        keeper.gate = asyncio.Event()
        with pytest.raises(DeadlineExceeded):
            await caption(first, image(), timeout=0.05)
        assert first.uses.count == 0

    asyncio.run(run())


def test_a_client_that_leaves_frees_its_place(two, image) -> None:
    first, keeper = two["first"]

    async def run() -> None:
        keeper.gate = asyncio.Event()
        waiting = [asyncio.ensure_future(caption(first, image())) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):  # one more than the queue of this model has
            await caption(first, image())
        waiting[0].cancel()
        await asyncio.sleep(0)
        assert first.uses.count == 1
        keeper.gate.set()
        assert await caption(first, image()) == "first"
        await waiting[1]

    asyncio.run(run())


def test_a_full_queue_of_one_model_leaves_room_for_another(two, image) -> None:
    (first, keeper), (_, other) = two["first"], two["second"]

    async def run() -> None:
        keeper.gate, other.gate = asyncio.Event(), asyncio.Event()
        other.gate.set()
        waiting = [asyncio.ensure_future(caption(first, image())) for _ in range(2)]
        await asyncio.sleep(0)
        assert await caption(first, image(), model="second") == "second"
        for each in waiting:
            each.cancel()

    asyncio.run(run())


def test_names(two) -> None:
    first, second = two["first"][0], two["second"][0]
    assert first.named(None) is first
    assert first.named("second") is second
    assert second.named("first") is first
    assert first.served("second") is second
    assert second.created == 1.0
    with pytest.raises(ModelNotFound, match="use 'first' or 'second'"):
        first.named("third")


def test_a_stream_is_a_use_until_its_last_token_and_its_result_outlives_the_model(two, image, engine) -> None:
    first, keeper = two["first"]

    async def run() -> None:
        keeper.gate = asyncio.Event()
        keeper.gate.set()
        engine.gate.clear()
        with first.admit() as permit:
            permit.take()
            stream = await first.stream(
                image(), CaptionOptions(), CaptionJob("id", permit, CaptionTimes()), live=True
            )
            assert first.uses.count == 1
            engine.gate.set()
            text = "".join([piece async for piece in stream])
        assert first.uses.count == 0
        first.detach()
        assert first.result(stream).caption == text.strip()

    asyncio.run(run())


@pytest.fixture
def absent(make_services: Callable[..., Services], serve_with: Callable[[Services], Services]) -> Services:
    """A server whose model has never been awake, with a queue of one image."""
    services = make_services(queue_size=1, timeout=PATIENCE)
    services.readiness.ready()
    keeper = FakeKeeper(services.captioner, lambda _: serve_with(services))
    keeper.gate.set()
    services.captioner.join("first", keeper, {"first": services.captioner})
    return services


def test_a_chat_that_waits_for_the_first_wake_keeps_its_place(
    absent: Services,
    new_client: Callable[[Services], TestClient],
    image: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its body is parsed once the model is awake, while other images arrive."""
    captioner, parse = absent.captioner, answers.parse_received

    async def parse_while_others_arrive(*arguments: Any) -> Any:
        with pytest.raises(QueueFull):
            captioner.take(captioner.admit())
        return await parse(*arguments)

    monkeypatch.setattr(answers, "parse_received", parse_while_others_arrive)
    _, body = chat(image(5), model="first").split(b"\r\n\r\n", 1)
    reply = new_client(absent).post("/v1/chat/completions", json=json.loads(body))
    assert (reply.status_code, reply.json()["choices"][0]["message"]["content"]) == (200, "5 7")
    assert captioner.admit().places == captioner._admission.taken == 0


@pytest.mark.parametrize(("limit", "status"), [(PATIENCE, 200), (0.1, 504)])
def test_the_first_wake_is_part_of_the_times_and_the_time_limit_of_a_chat(
    absent: Services,
    new_client: Callable[[Services], TestClient],
    image: Callable[..., bytes],
    limit: float,
    status: int,
) -> None:
    keeper: Any = absent.captioner.keeper
    wake = keeper.wake

    async def take_a_while() -> None:
        await asyncio.sleep(0.2)
        await wake()

    keeper.wake = take_a_while
    _, body = generate(image(5), model="first", options={"timeout": limit}).split(b"\r\n\r\n", 1)
    reply = new_client(absent).post("/api/generate", content=body)
    assert reply.status_code == status
    if status == 200:
        assert 0.2e9 <= reply.json()["load_duration"] <= reply.json()["total_duration"]
