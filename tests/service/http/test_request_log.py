"""The log's line of a request: why it was refused, whose it was, what it took; and few lines of probes."""

import base64
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.fakes.list_engine import PATIENCE

from snapcap.service.api.app import Services
from snapcap.service.http.middleware import RequestLog
from snapcap.service.limits import QueueFull
from snapcap.service.telemetry.tracing import trace_id_of

Png = Callable[..., bytes]
TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """The fields of the lines since the last call, those for debugging left out."""
    caplog.set_level(logging.DEBUG, "snapcap.access")

    def taken() -> list[dict[str, Any]]:
        fields = [vars(each)["fields"] for each in caplog.records if each.levelno >= logging.INFO]
        caplog.clear()
        return fields

    return taken


def test_a_caption_has_its_tokens_and_how_long_it_waited(client: TestClient, image: Png, lines: Any) -> None:
    text = base64.b64encode(image(5)).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}]
    chat = {"model": "fake", "messages": [{"role": "user", "content": parts}]}
    tensor = {"name": "image", "datatype": "BYTES", "shape": [2], "data": [text, text]}
    several = [("image", ("a", image())), ("image", ("b", image())), ("image", ("c", b"no"))]
    for ask, tokens in (
        (lambda: client.post("/v1/caption", content=image()), 2),
        (lambda: client.post("/", content=image()), 2),
        (lambda: client.post("/v1/captions", files=several), 4),
        (lambda: client.post("/v2/models/fake/infer", json={"inputs": [tensor]}), 4),
        (lambda: client.post("/v1/chat/completions", json=chat), 2),
        (lambda: client.post("/v1/chat/completions", json={**chat, "stream": True}), 2),
        (lambda: client.post("/v1/responses", json={"input": chat["messages"], "stream": True}), 2),
        (lambda: client.post("/api/generate", json={"images": [text]}), 2),
    ):
        assert ask().status_code == 200
        (line,) = lines()
        assert (line["client"], line["tokens"]) == ("testclient", tokens)
        assert 0.9 < line["queue_ms"] < line["ms"] + 1.1  # the engine says that it was 1 ms, whatever it was
        assert "code" not in line


@pytest.mark.parametrize("stream", [False, True])
def test_a_caption_that_a_stop_sequence_ended_has_its_tokens(
    client: TestClient, services: Services, engine, image: Png, lines: Any, stream: bool
) -> None:
    """The engine reports no end of it, but it is a caption, such as the first of the server."""
    engine.gate.clear()
    url = f"data:image/png;base64,{base64.b64encode(image(5)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    chat = {"messages": [{"role": "user", "content": parts}], "stop": "7", "stream": stream}
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(client.post, "/v1/chat/completions", json=chat)
        assert engine.submitted.wait(PATIENCE)
        for token in (5, 6, 7):
            engine.requests[0].on_token(token)
        assert asked.result(PATIENCE).status_code == 200
    (line,) = lines()
    assert line["tokens"] == 3
    assert "first_caption" in services.timeline.marks()


@pytest.mark.parametrize(
    ("path", "body", "headers", "why"),
    [
        ("/v1/caption", b"no image", {}, {"code": "unprocessable_image", "reason": "not_an_image"}),
        ("/v1/caption?promt=x", b"", {}, {"code": "unknown_option", "option": "promt"}),
        ("/v1/caption", b"x", {"Content-Type": "text/css"}, {"code": "unsupported_media_type"}),
        ("/v1/chat/completions", b"{", {}, {"code": "invalid_json"}),
        ("/nowhere", b"", {}, {"code": "not_found"}),
    ],
)
def test_a_refusal_says_why(client: TestClient, lines, path, body, headers, why: dict[str, str]) -> None:
    status = client.post(path, content=body, headers=headers).status_code
    (line,) = lines()
    assert {**line, **why, "status": status, "client": "testclient"} == line
    assert "queue_ms" not in line


def test_what_was_refused_after_it_waited_says_how_long(
    make_services, serve_with, new_client, engine, image: Png, lines
) -> None:
    services: Services = serve_with(make_services(timeout=PATIENCE))
    client = new_client(services)
    engine.takes_s = PATIENCE
    engine.gate.clear()
    assert client.post("/v1/caption", content=image()).status_code == 504
    (line,) = lines()
    assert (line["code"], line["tokens"]) == ("deadline_exceeded", 0)
    assert 0 < line["queue_ms"] <= line["ms"]
    engine.refuse = QueueFull(1)
    assert client.post("/v1/caption", content=image()).status_code == 429
    assert lines()[0]["code"] == "queue_full"
    services.readiness.fail("gone")
    assert client.post("/v1/caption", content=image()).status_code == 503
    (line,) = lines()
    assert (line["code"], line["phase"]) == ("not_ready", "failed")


def test_a_trace_is_taken_over_if_it_is_one(client: TestClient, image: Png, lines: Any) -> None:
    reply = client.post("/v1/caption", content=image(), headers={"traceparent": TRACEPARENT})
    assert reply.headers["x-trace-id"] == TRACE
    assert lines()[0]["trace_id"] == TRACE
    refused = client.post("/v1/caption", content=b"x", headers={"traceparent": TRACEPARENT})
    assert (refused.status_code, refused.headers["x-trace-id"]) == (422, TRACE)
    assert lines()[0]["trace_id"] == TRACE
    for headers in (
        [("traceparent", TRACEPARENT.upper())],
        [("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT)],
        [("traceparent", "x" * 30_000)],
    ):
        ignored = client.post("/v1/caption", content=image(), headers=headers)
        assert (ignored.status_code, ignored.headers.get("x-trace-id")) == (200, None)
        assert "trace_id" not in lines()[0]


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        (TRACEPARENT, True),
        (f"cc-{TRACE}-b7ad6b7169203331-01-what-comes-later", True),
        (f"cc-{TRACE}-b7ad6b7169203331-01", True),
        (f"{TRACEPARENT}-more", False),
        (f"ff-{TRACE}-b7ad6b7169203331-01", False),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE}-b7ad6b7169203331", False),
        (f"00-{TRACE[1:]}-b7ad6b7169203331-01", False),
        (f" {TRACEPARENT}", False),
        (f"{TRACEPARENT}\n", False),
        ("", False),
    ],
)
def test_traceparents(value: str, valid: bool) -> None:
    assert trace_id_of(value.encode()) == (TRACE if valid else None)


def test_probes_that_are_told_to_wait_have_few_lines(make_services, serve_with, new_client, lines: Any) -> None:
    services: Services = make_services()
    client = new_client(services)
    for _ in range(5):
        for path in ("/readyz", "/v2/health/ready"):
            assert client.get(path).status_code == 503
        assert client.get("/livez").status_code == 200
    assert [(line["path"], line["status"], line["state"]) for line in lines()] == [
        ("/readyz", 503, "starting"),
        ("/v2/health/ready", 503, "starting"),
    ]
    serve_with(services)
    for _ in range(3):
        client.get("/readyz")
    (line,) = lines()
    assert (line["status"], line["state"], line["left_out"]) == (200, "ready", 4)
    services.readiness.drain()
    for _ in range(3):
        client.get("/readyz")
    assert [line["state"] for line in lines()] == ["draining"]


def test_probes_of_v2_have_few_lines_and_are_no_traffic(make_services, serve_with, new_client, lines: Any) -> None:
    """KServe and Triton probe these paths, one of which answers 200 while the others answer 503."""
    services: Services = make_services()
    client = new_client(services)
    paths = ("/v2/health/ready", "/v2/models/fake/ready", "/v2/models/fake/versions/1/ready")
    for _ in range(3):
        assert [client.get(path).status_code for path in paths] == [503] * 3
        assert client.get("/v2/health/live").status_code == 200
    assert sorted(line["path"] for line in lines()) == sorted(paths)
    serve_with(services)
    for _ in range(3):
        assert [client.get(path).status_code for path in paths] == [200] * 3
    assert sorted((line["path"], line["left_out"]) for line in lines()) == sorted((path, 2) for path in paths)
    sample = services.registry.get_sample_value
    assert sample("snapcap_requests_total", {"api": "v2_health", "code": "503"}) == 9
    assert sample("snapcap_requests_total", {"api": "v2", "code": "503"}) is None
    assert sample("snapcap_request_duration_seconds_count", {"api": "v2"}) is None


def test_a_probe_that_goes_on_failing_has_a_line_a_minute(lines: Any) -> None:
    now = [100.0]
    log = RequestLog(lambda: now[0])

    def ask(status: int = 503, state: str = "starting") -> list[Any]:
        scope = {"method": "GET", "state": {"request_id": "a", "why": {"state": state}}}
        log.write(scope, "readyz", status, 0.0, 0.0, captions=False)
        return [(line["state"], line.get("left_out")) for line in lines()]

    assert ask() == [("starting", None)]
    for second in range(1, 60):
        now[0] = 100.0 + second
        assert ask() == []
    now[0] = 160.0
    assert ask() == [("starting", 59)]
    assert ask(state="failed") == [("failed", 0)]
    assert ask() == [("starting", 0)]
    assert ask() == []
    assert ask(200, "ready") == [("ready", 1)]
    assert ask(200, "ready") == []


def test_a_request_that_captions_has_its_line_while_probes_have_none(make_services, new_client, lines) -> None:
    client = new_client(make_services())
    for _ in range(3):
        assert client.post("/v1/caption", content=b"x").status_code == 503
    assert [line["code"] for line in lines()] == ["not_ready"] * 3
    for _ in range(3):
        assert client.get("/v2/models/fake/ready").status_code == 503
    assert [line["code"] for line in lines()] == ["not_ready"]
