"""When a model wakes, is refused and leaves, with processes that are played."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.fakes.passing_time import ModuleClock, pass_on_loop
from support.fakes.thread_decoder import attach

from snapcap.models.processing.transform import ImageTransform
from snapcap.service.api.app import Services
from snapcap.service.config.settings import ResidencySettings, Settings
from snapcap.service.errors import DeadlineExceeded, ModelNotAwake
from snapcap.service.server import residency
from snapcap.service.server.residency import ModelState, Residency, Resident
from snapcap.warmup.progress import status
from tests.service.conftest import FakeTokenizer

ONE = 100 << 20  # bytes of memory that a model takes
PATIENCE = 10.0


class Client:
    """The processes of one model, which end when `gone` is set. `made` has all of them."""

    made: list["Client"]
    device_bytes = 0
    pids = (1,)

    def __init__(
        self, _parts: Any, _settings: Settings, _services: Services, resident: Resident, _loop: Any
    ) -> None:
        self.resident, self.gone = resident, asyncio.Event()
        self.gone.set()
        self.made.append(self)

    def start(self) -> None:
        pass

    def ready(self) -> None:
        part: Any = SimpleNamespace()
        self.resident.ready(part, part, part)

    async def leave(self) -> None:
        await self.gone.wait()

    def close(self) -> None:
        pass


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[Client]:
    Client.made = []
    tokenizer: Any = FakeTokenizer()

    def attached(_settings: Settings, services: Services, engine: Any, *_: Any) -> None:
        attach(services.captioner, engine, ImageTransform(size=(8, 8)), tokenizer)

    monkeypatch.setattr(residency, "spawn_processes", lambda *_: None)
    monkeypatch.setattr(residency, "EngineClient", Client)
    monkeypatch.setattr(residency, "attach", attached)
    monkeypatch.setattr(residency, "own_bytes", lambda _pid: ONE)
    return Client.made


@pytest.fixture
def residents(clients: list[Client], make_services: Callable[..., Services]) -> Callable[[], dict[str, Resident]]:
    """Returns a function that returns absent models, named by letters, and takes the number of them that fit
    together. Called on an event loop."""
    services = make_services()

    def make(names: str = "ab", fitting: int = 1) -> dict[str, Resident]:
        limits = ResidencySettings(host_memory=ONE * fitting + ONE // 2, preload=("none",))
        settings = replace(Settings(), residency=limits)
        loop, models = asyncio.get_running_loop(), dict.fromkeys(names, settings)
        owner = Residency(models, None, settings, services, lambda: None, loop)
        for each in owner.residents.values():
            each.memory = residency.Memory(host=ONE)
        return owner.residents

    return make


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def wake(model: Resident, clients: list[Client]) -> None:
    """Wakes a model, whose processes are ready as soon as they have been started."""
    before = len(clients)
    waking = asyncio.create_task(model.wake())
    await until(lambda: len(clients) > before)
    clients[before].ready()
    await waking


async def begun(
    residents: Callable[[], dict[str, Resident]], clients: list[Client]
) -> tuple[Resident, "asyncio.Task[None]"]:
    """Returns a model whose processes have been started, and a request that waits for it."""
    model = residents()["a"]
    waking = asyncio.create_task(model.wake())
    await until(lambda: clients)
    return model, waking


def test_a_model_that_never_wakes_is_refused_for_a_minute_at_most(
    residents: Callable[[], dict[str, Resident]], clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it has failed: a day has thousands of failures."""
    monkeypatch.setattr(residency, "time", ModuleClock())

    async def run() -> None:
        model = residents()["a"]
        pauses = []
        for failures in (0, 1, 5, 6, 2000):
            model._failures, model._may_wake = failures, 0.0
            waking = asyncio.create_task(model.wake())
            await until(lambda: model.state is ModelState.WAKING)
            model.told_failed("broken")
            with pytest.raises(ModelNotAwake) as refused:
                await waking
            assert "'a' cannot wake: broken" in refused.value.detail
            pauses.append(math.ceil(model._pause))
            await until(lambda: model.state is ModelState.ABSENT)
            with pytest.raises(ModelNotAwake):
                await model.wake()
            with pytest.raises(ModelNotAwake):
                model.check()
        model._may_wake = 0.0
        model.check()
        assert pauses == [1, 2, 32, 60, 60]
        assert len(clients) == 5, "a refused request starts no process"

    asyncio.run(run())


@pytest.mark.parametrize("torch_modules", [0, 500])
def test_a_model_that_takes_too_much_may_try_again_only_if_it_started_with_torch(
    residents: Callable[[], dict[str, Resident]],
    clients: list[Client],
    monkeypatch: pytest.MonkeyPatch,
    torch_modules: int,
) -> None:
    """A build may make what a start without torch needs, and such a start takes less."""
    monkeypatch.setattr(residency, "own_bytes", lambda _pid: 2 * ONE)
    monkeypatch.setattr(status, "torch_modules", lambda: 0)  # this process may have torch

    async def run() -> None:
        model, waking = await begun(residents, clients)
        model.start.status.compiled_elsewhere(status.CompilerCounts(modules=torch_modules))
        clients[0].ready()
        with pytest.raises(ModelNotAwake) as refused:
            await waking
        assert "200 MiB of 150 MiB (--host-memory)" in refused.value.detail
        assert ("run `snapcap build`" in refused.value.detail) == (torch_modules > 0)
        assert (model._may_wake < math.inf) == (torch_modules > 0)

    asyncio.run(run())


def test_a_model_that_has_failed_refuses_at_once_while_its_processes_end(
    residents: Callable[[], dict[str, Resident]], clients: list[Client]
) -> None:
    async def run() -> None:
        model, waking = await begun(residents, clients)
        clients[0].gone.clear()
        model.told_failed("broken")
        with pytest.raises(ModelNotAwake):
            await waking
        assert model.state is ModelState.LEAVING
        with pytest.raises(ModelNotAwake):
            await asyncio.wait_for(model.wake(), PATIENCE)
        clients[0].gone.set()
        await until(lambda: model.state is ModelState.ABSENT)

    asyncio.run(run())


def test_a_start_that_has_failed_is_not_ready_afterwards(
    residents: Callable[[], dict[str, Resident]], clients: list[Client]
) -> None:
    """The message of the engine process may be on its way when the decode processes fail."""

    async def run() -> None:
        model, waking = await begun(residents, clients)
        model.told_failed("no image can be decoded")
        clients[0].ready()
        with pytest.raises(ModelNotAwake):
            await waking
        await until(lambda: model.state is ModelState.ABSENT)
        assert model._pause > 0

    asyncio.run(run())


def test_requests_with_short_time_limits_get_their_model_a_turn(
    residents: Callable[[], dict[str, Resident]], clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request waits until a busy model must leave, but all of them together do."""
    monkeypatch.setattr(residency, "_TURN_S", 0.3)

    async def run() -> None:
        models = residents()
        waking = asyncio.create_task(models["a"].wake())
        await until(lambda: clients)
        clients[0].ready()
        await waking
        busy = models["a"].captioner.uses
        with busy:
            for _ in range(20):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(models["b"].wake(), 0.05)
                if models["a"].state is ModelState.LEAVING:
                    break
            assert models["a"].state is ModelState.LEAVING
            assert len(clients) == 1, "it still has a request"
        await until(lambda: len(clients) == 2)
        clients[1].ready()
        await models["b"].wake()
        assert models["a"].state is ModelState.ABSENT

    asyncio.run(run())


def test_two_models_that_are_asked_for_in_turn_wake_once_a_request(
    residents: Callable[[], dict[str, Resident]], clients: list[Client]
) -> None:
    """An idle model leaves after a moment, so a client that alternates waits for wakes alone."""

    async def run() -> None:
        models = residents()
        for turn, name in enumerate("ababab"):
            waking = asyncio.create_task(models[name].wake())
            await until(lambda turn=turn: len(clients) > turn)
            assert [each.state for each in models.values()].count(ModelState.READY) == 0, "there was room before"
            clients[turn].ready()
            await asyncio.wait_for(waking, PATIENCE)
        assert len(clients) == 6

    asyncio.run(run())


def test_a_model_that_has_just_woken_stays_for_a_client_that_returns_at_once(
    residents: Callable[..., dict[str, Resident]], clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later it leaves between two requests of that client."""
    clock = ModuleClock()
    monkeypatch.setattr(residency, "time", clock)

    async def run() -> None:
        model = residents()["a"]
        waking = asyncio.create_task(model.wake())
        await until(lambda: clients)
        clients[0].ready()
        await waking

        def idle_for(seconds: float) -> bool:
            with model.captioner.uses:
                assert not model.can_leave
            model.captioner.uses.last = clock.monotonic() - seconds
            return model.can_leave

        assert not idle_for(residency._RETURNS_S / 2)
        assert idle_for(residency._RETURNS_S * 2)
        clock.forward(residency._TURN_S * 1.5)
        assert idle_for(0.0)

    asyncio.run(run())


def test_no_more_models_leave_than_the_one_that_wakes_needs(
    residents: Callable[..., dict[str, Resident]], clients: list[Client]
) -> None:
    """The memory of a model that is leaving is not free yet, but will be."""

    async def run() -> None:
        models = residents("abc", fitting=2)
        for name in "ab":
            await wake(models[name], clients)
        clients[0].gone.clear()
        waking = asyncio.create_task(models["c"].wake())
        await until(lambda: models["a"].state is ModelState.LEAVING)
        await asyncio.sleep(5 * residency._MOMENT_S)
        assert models["b"].state is ModelState.READY
        clients[0].gone.set()
        await until(lambda: len(clients) == 3)
        clients[2].ready()
        await waking
        assert [each.state for each in models.values()] == [ModelState.ABSENT, ModelState.READY, ModelState.READY]

    asyncio.run(run())


def test_an_idle_model_leaves_for_one_that_waits_for_a_long_request(
    residents: Callable[..., dict[str, Resident]], clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "_TURN_S", 0.1)

    async def run() -> None:
        models = residents("abc", fitting=2)
        for name in "ab":
            await wake(models[name], clients)
        with models["a"].captioner.uses:
            models["a"].leave("memory")
            waking = asyncio.create_task(models["c"].wake())
            await until(lambda: len(clients) == 3)
            assert models["a"].state is ModelState.LEAVING
            assert models["b"].state is ModelState.ABSENT
            clients[2].ready()
            await waking

    asyncio.run(run())


def test_a_request_whose_time_is_over_ends_no_wake(
    residents: Callable[[], dict[str, Resident]], clients: list[Client], services: Services
) -> None:
    async def run() -> None:
        model = residents()["a"]
        waiting = asyncio.create_task(model.captioner.awake())
        await until(lambda: clients)
        pass_on_loop(model.captioner._timeout)
        with pytest.raises(DeadlineExceeded):
            await waiting
        assert model.state is ModelState.WAKING
        clients[0].ready()
        await model.captioner.awake()
        assert len(clients) == 1

    asyncio.run(run())


def test_the_seconds_of_a_wake_begin_with_its_request(
    residents: Callable[[], dict[str, Resident]], clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for room is the longer part of many wakes."""
    clock = ModuleClock()
    monkeypatch.setattr(residency, "time", clock)

    async def run() -> None:
        models = residents()
        waking = asyncio.create_task(models["a"].wake())
        await until(lambda: clients)
        clients[0].ready()
        await waking
        clients[0].gone.clear()
        clock.forward(1.0)
        waking = asyncio.create_task(models["b"].wake())
        await until(lambda: models["a"].state is ModelState.LEAVING)
        clock.forward(5.0)
        clients[0].gone.set()
        await until(lambda: len(clients) == 2)
        clock.forward(1.0)
        clients[1].ready()
        await waking
        (family,) = models["a"].owner.wake_seconds.collect()
        seconds = {each.labels["model"]: each.value for each in family.samples if each.name.endswith("_sum")}
        assert seconds == {"a": 0.0, "b": pytest.approx(6.0)}

    asyncio.run(run())
