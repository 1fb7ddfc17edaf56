"""Builds a server's parts around a fake engine: a real thread that completes requests once its gate is open."""

import io
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from PIL import Image
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient
from support.fakes.list_engine import PATIENCE, Served
from support.fakes.passing_time import pass_on_loop
from support.fakes.scheduling import LIMITS, TABLE, Clock
from support.fakes.thread_decoder import attach
from support.servers.live_app import create_app, on_a_port

from snapcap.models.processing.transform import ImageTransform
from snapcap.models.text import Dialogue, PromptIds
from snapcap.service.api.app import Services
from snapcap.service.captioning.captioner import Captioner
from snapcap.service.config.settings import QueueSettings
from snapcap.service.engine.request import CaptionRequest, Completion, Limits
from snapcap.service.engine.scheduler import Scheduler
from snapcap.service.http.bodies import BodyLimits
from snapcap.service.readiness import Readiness
from snapcap.service.telemetry.metrics import Metrics
from snapcap.service.telemetry.start_metrics import StartupCollector
from snapcap.warmup.progress.status import StartupStatus
from snapcap.warmup.progress.timeline import Timeline

MAX_BODY = 1 << 20


class FakeEngine:
    """Completes each request with one token for each pixel row, so that the reply tells which image it is for.
    `takes_s`: seconds that pass on the event loop as soon as a request is submitted."""

    def __init__(self) -> None:
        self.limits = Limits(cache_length=64, default_new_tokens=16, eos_ids=frozenset({1}))
        self.gate = threading.Event()
        self.gate.set()
        self.requests: list[CaptionRequest] = []
        self.refuse: Exception | None = None
        self.fail: Exception | None = None
        self.takes_s = 0.0
        self.submitted = threading.Event()
        self._queue: queue.SimpleQueue[CaptionRequest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def submit(self, request: CaptionRequest) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)
        self._queue.put(request)
        self.submitted.set()
        if self.takes_s:
            pass_on_loop(self.takes_s)

    def stop(self) -> None:
        self.gate.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            self.gate.wait()
            if request.future.cancelled():
                continue
            if request.on_admitted is not None:
                request.on_admitted()
            if self.fail is not None:
                request.future.set_exception(self.fail)
            else:
                tokens = (int(request.pixels[0, 0, 0]), 7)
                for token in tokens if request.on_token is not None else ():
                    request.on_token(token)
                with suppress(InvalidStateError):  # a stop sequence, or a client that left
                    request.future.set_result(Completion(tokens, "stop", "eager", 0.001, 0.002, 0.003))


class FakeTokenizer:
    """A token for each word; ids are spelt as they are."""

    takes_instructions = takes_conversations = False

    def prompt_ids(self, text: str, around: Dialogue = Dialogue(), most_ahead: int | None = None) -> PromptIds:  # noqa: B008 - frozen
        before, after = (" ".join(said for _, said in part) for part in (around.before, around.after))
        ahead, own = (
            tuple(1000 + len(word) for word in part.split())
            for part in (f"{before} {around.lead}", f"{text} {after}")
        )
        if around.lead and (not self.takes_conversations or len(ahead) > (most_ahead or 0)):
            found = self.prompt_ids(f"{around.lead} {text}", replace(around, lead=""), most_ahead)
            return found._replace(moved=len(ahead))
        return PromptIds((*ahead, *own), len(ahead))

    def caption(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> str:
        return " ".join(str(each) for each in (*prompt_ids, *tokens))

    def stream(self, _prompt_ids: object) -> SimpleNamespace:
        return SimpleNamespace(push=lambda token: f" {token}", end=lambda: "")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.stop()


@pytest.fixture
def make_services() -> Iterator[Callable[..., Services]]:
    """Services before the model is there; `queue_size`, `timeout` and `timeline` as keywords."""
    made: list[Services] = []

    def make(queue_size: int = 8, timeout: float = 30.0, timeline: Timeline | None = None) -> Services:
        registry = CollectorRegistry()
        metrics = Metrics(registry)
        timeline = timeline or Timeline.since_exec()
        status = StartupStatus()
        readiness = Readiness(lambda: timeline.current() or "starting")
        captioner = Captioner(QueueSettings(queue_size, timeout), readiness, metrics, timeline)
        registry.register(StartupCollector(timeline, status, readiness, lambda: captioner.model_name))
        made.append(Services(captioner, readiness, metrics, registry, timeline, status))
        return made[-1]

    yield make
    for services in made:
        services.captioner.close()


@pytest.fixture
def serve_with(engine: FakeEngine) -> Callable[[Services], Services]:
    """Attaches the fake engine and makes the services ready."""

    def serve(services: Services) -> Services:
        attach(services.captioner, engine, ImageTransform(size=(8, 8)), FakeTokenizer())
        services.readiness.ready()
        return services

    return serve


@pytest.fixture
def services(make_services: Callable[..., Services], serve_with: Callable[[Services], Services]) -> Services:
    """Ready to caption."""
    return serve_with(make_services())


@pytest.fixture
def instructed(services: Services) -> None:
    """The served model takes instructions."""
    captioner: Any = services.captioner
    captioner._model.defaults.tokenizer(None).takes_instructions = True
    captioner.facts = captioner.facts._replace(takes_instructions=True)


@pytest.fixture
def conversing(instructed: None, services: Services, engine: FakeEngine) -> None:
    """The served model reads conversations, and up to seven tokens before an image."""
    captioner: Any = services.captioner
    captioner._model.defaults.tokenizer(None).takes_conversations = True
    captioner.facts = captioner.facts._replace(takes_conversations=True)
    engine.limits = replace(engine.limits, prompt_read=8)


@pytest.fixture
def client(services: Services) -> TestClient:
    return client_of(services)


def client_of(services: Services) -> TestClient:
    return TestClient(create_app(services, BodyLimits(MAX_BODY, 5.0)))


@pytest.fixture
def new_client() -> Callable[[Services], TestClient]:
    return client_of


@pytest.fixture
def document(client: TestClient) -> dict[str, Any]:
    return client.get("/openapi.json").json()


@pytest.fixture
def check(document: dict[str, Any]) -> Callable[[object, str], None]:
    """Holds a reply to a schema of the OpenAPI document."""

    def against(reply: object, schema: str) -> None:
        jsonschema.validate(reply, {"$ref": f"#/components/schemas/{schema}", "components": document["components"]})

    return against


def png(red: int = 200, size: tuple[int, int] = (8, 8)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (red, 0, 0)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def image() -> Callable[..., bytes]:
    """`image(red)`: a PNG whose caption begins with that number."""
    return png


@pytest.fixture(params=["in_step", "ahead", "beside"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A real engine over a runner of lists, which waits for the host, runs ahead of it as a GPU does, or encodes
    beside decode steps as the CPU library does."""
    served = Served(runs_ahead=request.param == "ahead", encodes_beside=request.param == "beside")
    yield served
    served.engine.stop()
    served.thread.join(PATIENCE)
    assert not served.thread.is_alive()


@pytest.fixture
def serve(new_client) -> Iterator[Callable[..., str]]:
    """``serve(services, port=0)`` -> the address of the application over them."""
    with ExitStack() as exits:
        yield lambda services, port=0: exits.enter_context(on_a_port(new_client(services).app, port)) + "/"


@pytest.fixture
def address(services: Services, serve: Callable[..., str]) -> str:
    services.timeline.mark("ready")
    services.status.started()
    return serve(services)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scheduler(clock: Clock) -> Scheduler:
    return Scheduler(TABLE, LIMITS, clock=clock)
