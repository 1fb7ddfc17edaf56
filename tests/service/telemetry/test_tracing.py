"""Traces by OpenTelemetry's variables: whether there are any, and what a collector gets of a real server."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.servers.live_app import create_app
from support.servers.otlp_collector import Collector, attributes, collecting
from support.servers.server_process import ServerProcess

from snapcap.service.api.app import Services
from snapcap.service.captioning.times import CaptionTimes
from snapcap.service.http.bodies import BodyLimits
from snapcap.service.http.middleware import begin_span
from snapcap.service.telemetry.tracing import open_tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
PARTS = ["decode image", "queue", "encode", "decode"]


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({}, ""),
        ({"OTEL_SERVICE_NAME": "captions", "OTEL_TRACES_SAMPLER": "always_on"}, ""),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, ""),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER=zipkin is not supported"),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"),
        (ENDPOINT, "pip install 'snapcap[otel]'"),
    ],
)
def test_what_cannot_be_traced_says_so(
    environ: dict[str, str], why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "snapcap.service.telemetry.otel", None)  # not installed
    with caplog.at_level(logging.INFO, "snapcap.server"):
        assert open_tracing(environ) is None
    said = [vars(each)["fields"]["why"] for each in caplog.records]
    assert len(said) == bool(why)
    assert all(why in each for each in said)


def test_a_variable_that_cannot_be_read_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with caplog.at_level(logging.INFO, "snapcap.server"):
        assert open_tracing(ENDPOINT) is None
    assert "requests are not traced" in caplog.text


def test_the_parser_of_baggage_gets_none() -> None:
    """The parser takes 0.2 s for 8,000 spaces, on the event loop, and logs 8 KiB of a client's text."""
    given: list[dict[str, str]] = []

    class Tracing:
        def begin(self, method: str, headers: dict[str, str]) -> Any:
            given.append(headers)
            return SimpleNamespace(trace_id=TRACE)

    fields = ((b"traceparent", TRACEPARENT.encode()), (b"tracestate", b"a=1"), (b"baggage", b"a=1" + b" " * 8000))
    begin_span(Tracing(), {"method": "POST", "headers": fields, "state": {"trace_id": TRACE}})  # type: ignore[arg-type]
    assert given == [{"traceparent": TRACEPARENT, "tracestate": "a=1"}]


def test_a_collector_that_is_not_there_holds_up_no_exit(
    services: Services, image: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*next(iter(ENDPOINT.items())))
    tracing = open_tracing(ENDPOINT)
    assert tracing is not None
    monkeypatch.setattr("snapcap.service.telemetry.otel._CLOSE_S", 0.01)
    app = create_app(services, BodyLimits(1 << 20, 5.0))
    app.trace(tracing)
    client = TestClient(app)
    reply = client.post("/v1/caption", content=image(), headers={"traceparent": "nonsense"})
    assert (reply.status_code, len(reply.headers["x-trace-id"])) == (200, 32)
    assert "x-trace-id" not in client.get("/livez").headers  # probes are not traced
    tracing.close()
    assert client.post("/v1/caption", content=image()).status_code == 200


def test_the_parts_of_a_caption_follow_one_another() -> None:
    times = CaptionTimes()
    times.started = 10.0
    assert list(times.spans(11.0)) == []
    assert times.waited_s(11.0) == 1.0
    times.image_began, times.image_s = 10.5, 0.25
    assert list(times.spans(11.0)) == [("decode image", 10.5, 10.75), ("queue", 10.75, 11.0)]
    assert times.waited_s(11.0) == 0.75
    times.admitted = 10.9
    assert [name for name, *_ in times.spans(12.0)] == PARTS[:2]
    times.queue_s, times.encode_s, times.decode_s = 0.125, 0.5, 1.0
    assert list(times.spans(12.0)) == [
        ("decode image", 10.5, 10.75),
        ("queue", 10.75, 10.875),
        ("encode", 10.875, 11.375),
        ("decode", 11.375, 12.0),
    ]
    assert times.waited_s(12.0) == 0.625


@pytest.fixture(scope="module")
def exported(compiled_options: tuple[str, ...], samples: dict[Path, str]) -> Any:
    """A collector, and what a real server answered to a caption, a refusal and a probe; it has been stopped."""
    path = next(iter(samples))
    with collecting() as collector:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.address,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=photos",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        }
        with ServerProcess(*compiled_options, "--log-format", "json", **variables) as server:
            server.wait_ready()
            traced = {"traceparent": TRACEPARENT, "tracestate": "a=b", "X-Request-Id": "of-the-test"}
            replies = [
                server.call("/v1/caption?max_new_tokens=3", path.read_bytes(), traced),
                server.call("/models/demo", b"no image", {"traceparent": TRACEPARENT.replace("-01", "-00")}),
                server.call("/models/demo", b"no image"),
                server.call("/livez", headers={"traceparent": TRACEPARENT}),
            ]
            server.terminate()
            assert server.process.wait(60) == 0  # the last spans are exported
            lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
        yield collector, replies, lines


def test_a_caption_of_a_real_server_has_its_spans(exported: tuple[Collector, list[Any], list[Any]]) -> None:
    collector, replies, lines = exported
    request, *parts = [span for span in collector.wait_for(6) if span.trace_id.hex() == TRACE]
    assert (request.name, request.kind, request.parent_span_id.hex()) == ("POST /v1/caption", 2, PARENT)
    assert request.trace_state == "a=b"
    found = attributes(request)
    assert (found["http.route"], found["http.response.status_code"]) == ("/v1/caption", 200)
    assert (found["snapcap.request_id"], found["snapcap.tokens"]) == ("of-the-test", 3)
    assert "max_new_tokens" not in str(found)
    assert [span.name for span in parts] == PARTS
    end = request.start_time_unix_nano
    for span in parts:
        assert span.parent_span_id == request.span_id
        assert span.start_time_unix_nano >= end - 1_000_000
        end = span.end_time_unix_nano
        assert span.start_time_unix_nano <= end <= request.end_time_unix_nano + 1_000_000
    timings = replies[0][1]["timings"]
    for span, name in ((parts[0], "decode_image"), (parts[2], "encode"), (parts[3], "decode")):
        assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6 == pytest.approx(timings[name], abs=0.01)
    (line,) = [line for line in lines if line.get("request_id") == "of-the-test"]
    assert line["trace_id"] == TRACE == headers_of(replies[0])["x-trace-id"]


def test_the_rest_follows_the_variables(exported: tuple[Collector, list[Any], list[Any]]) -> None:
    collector, replies, lines = exported
    assert collector.headers["x-tenant"] == "photos"
    assert collector.resource["service.name"] == "snapcap"
    assert collector.resource["deployment.environment.name"] == "test"
    # The caller of the second does not sample, nobody calls the third, and probes are not traced.
    (own,) = [span for span in collector.spans if span.trace_id.hex() != TRACE]
    assert (own.name, own.parent_span_id) == ("POST /models/{model}", b"")
    assert (attributes(own)["error.type"], attributes(own)["url.path"]) == ("unprocessable_image", "/models/demo")
    assert len(collector.spans) == 6
    assert headers_of(replies[2])["x-trace-id"] == own.trace_id.hex()
    assert [headers_of(replies[number])["x-trace-id"] for number in (1, 3)] == [TRACE, TRACE]
    assert [line for line in lines if line["level"] in ("warning", "error")] == []


def headers_of(reply: tuple[int, Any, dict[str, str]]) -> dict[str, str]:
    return {name.lower(): value for name, value in reply[2].items()}


def test_the_log_has_no_password_of_a_collector(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="OPENTELEMETRY'S SDK IS NOT INSTALLED: NOTHING IS TRACED")
    with caplog.at_level(logging.INFO, "snapcap.server"):
        tracing = open_tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:s3cret@127.0.0.1:1/v1?key=s3cret"})
    assert tracing is not None
    tracing.close()
    (record,) = caplog.records
    assert vars(record)["fields"] == {"to": "http://127.0.0.1:1/v1"}
