"""/livez, /readyz, /startup, /metrics, /openapi.json and /docs."""

import asyncio
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from snapcap.service.api.app import Services
from snapcap.service.api.operations import MetricsText
from snapcap.service.telemetry.work import Batch, Work

Png = Callable[..., bytes]


@pytest.mark.parametrize("path", ["/readyz", "/health"])
def test_readyz_follows_the_state(make_services, serve_with, new_client, path: str) -> None:
    services = make_services()
    client = new_client(services)
    with services.timeline.phase("import_torch"):
        starting = client.get(path)
        assert client.get("/livez").status_code == 200
    assert (starting.status_code, starting.json()) == (503, {"state": "starting", "phase": "import_torch"})
    serve_with(services)
    ready = client.get(path)
    assert (ready.status_code, ready.json()) == (200, {"state": "ready", "phase": "ready"})
    services.readiness.drain()
    assert client.get(path).status_code == 503
    assert client.get("/livez").status_code == 200


def test_readyz_says_why_the_start_failed(make_services, new_client) -> None:
    services = make_services()
    services.readiness.fail("no such folder")
    reply = new_client(services).get("/readyz")
    assert (reply.status_code, reply.json()["error"]) == (503, "no such folder")


def test_startup_shows_phases_marks_and_buckets(services: Services, client: TestClient, check) -> None:
    services.timeline.mark("live")
    services.status.expect((1, 4), "cpu", "float32")
    services.status.update("encoder", 4, "eager", "eager", 0.25, 1.5)
    with services.timeline.phase("warm_encoder"):
        body = client.get("/startup").json()
    check(body, "Startup")
    assert body["phases"][0]["name"] == "interpreter"
    assert body["phases"][-1]["name"] == "warm_encoder"
    assert body["phases"][-1]["end"] is None
    assert 0 < body["marks"]["live"] <= body["now"]
    warmed = {
        "component": "encoder",
        "size": 4,
        "state": "eager",
        "backend": "eager",
        "seconds": 0.25,
        "start": 1.5,
    }
    assert warmed in body["buckets"]
    assert body["compile_events"] == {"startup": 0, "serving": 0}
    assert body["backend"] == "eager"


def test_startup_has_no_member_that_is_not_described(
    services: Services, client: TestClient, document, check
) -> None:
    fetched = SimpleNamespace(result="stale", reason="torch differs", seconds=0.5, bytes_fetched=7)
    artifacts: Any = SimpleNamespace(fetched=fetched, key="a1", factors={"kind": "aot"})
    services.status.fetched(artifacts)
    services.status.building(state="building", done=1, of=3)
    services.status.expect((1,), "cpu", "float32")
    body = client.get("/startup").json()
    check(body, "Startup")
    schemas = document["components"]["schemas"]
    assert set(body) == set(schemas["Startup"]["properties"]) - {"models"}  # which a server of several models has
    assert set(body["artifacts"]) == set(schemas["Artifacts"]["properties"])
    assert set(body["build"]) <= set(schemas["Build"]["properties"])
    assert set(body["buckets"][0]) == set(schemas["Bucket"]["properties"])


@pytest.mark.parametrize("progress", [{"state": "asleep"}, {"done": 1}, {"state": "building", "done": "1"}])
def test_the_description_of_a_build_refuses_what_is_none(progress: dict[str, Any], check) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check(progress, "Build")


def test_startup_shows_the_sentence_of_a_failed_start(make_services, new_client) -> None:
    services = make_services()
    services.readiness.fail("no such folder")
    assert new_client(services).get("/startup").json()["error"] == "no such folder"


def samples(client: TestClient) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name and by label values, in the order of the labels' names."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(value for _, value in sorted(sample.labels.items()))] = (
                sample.value
            )
    return found


def test_metrics_of_the_start(make_services, serve_with, new_client) -> None:
    services = make_services()
    client = new_client(services)
    services.status.expect((1, 4), "cpu", "float32")
    before = samples(client)
    assert before["snapcap_ready"][()] == 0
    assert before["snapcap_lifecycle_state"][("starting",)] == 1
    assert "snapcap_process_start_to_ready_seconds" not in before
    assert "snapcap_model_info" not in before

    with services.timeline.phase("load_weights"):
        pass
    services.timeline.mark("live")
    services.timeline.mark("ready")
    services.status.update("decoder", 4, "eager", "eager", 0.5)
    services.status.started()
    serve_with(services)
    after = samples(client)
    assert after["snapcap_ready"][()] == 1
    assert after["snapcap_lifecycle_state"] == {
        ("starting",): 0,
        ("ready",): 1,
        ("draining",): 0,
        ("failed",): 0,
    }
    assert after["snapcap_process_start_to_live_seconds"][()] > 0
    assert after["snapcap_process_start_to_ready_seconds"][()] > 0
    assert {"interpreter", "load_weights"} <= {
        label for (label,) in after["snapcap_startup_phase_duration_seconds"]
    }
    assert after["snapcap_startup_tier"] == {("eager",): 1}
    assert after["snapcap_model_info"] == {("cpu", "float32", "fake"): 1}
    assert after["snapcap_warmup_bucket_duration_seconds"] == {("4", "decoder"): 0.5}
    assert after["snapcap_warmup_buckets_expected"][()] == 4
    assert after["snapcap_warmup_buckets_completed"][()] == 1


def test_metrics_of_requests(services: Services, client: TestClient, image: Png) -> None:
    client.post("/v1/caption", content=image())
    client.post("/v1/caption", content=b"no")
    client.get("/secret/path")
    found = samples(client)
    assert found["snapcap_requests_total"] == {("caption", "200"): 1, ("caption", "422"): 1, ("other", "404"): 1}
    assert found["snapcap_request_duration_seconds_count"][("caption",)] == 2
    assert found["snapcap_requests_in_flight"][()] == 0
    assert found["snapcap_image_decode_seconds_count"] == {("png",): 1}
    assert found["snapcap_image_decode_failures_total"] == {("not_an_image",): 1}


def test_metrics_of_the_engine(services: Services, client: TestClient) -> None:
    services.metrics.worked(Work(Batch(8, 5, 0.002), [Batch(4, 3, 0.01)], [0.1], 13))
    services.metrics.worked(Work(Batch(8, 8, 0.002), [], [], 0))
    found = samples(client)
    assert found["snapcap_rows_total"] == {("encoder",): 4, ("decoder",): 16}
    assert found["snapcap_padding_rows_total"] == {("encoder",): 1, ("decoder",): 3}
    assert found["snapcap_step_duration_seconds_count"] == {("4", "encoder"): 1, ("8", "decoder"): 2}
    assert found["snapcap_decode_batch_size_sum"][()] == 13
    assert found["snapcap_generated_tokens_total"][()] == 13
    assert found["snapcap_queue_wait_seconds_count"][()] == 1


def test_metrics_are_described_and_carry_their_unit(services: Services) -> None:
    ours = [family for family in services.registry.collect() if family.name.startswith("snapcap_")]
    assert len(ours) > 20
    for family in ours:
        assert re.match(r"[A-Z0-9].*\.$", family.documentation), family.name
        assert (" seconds" in f" {family.documentation.lower()}") == family.name.endswith("_seconds"), family.name
        assert family.documentation.startswith("Bytes") == family.name.endswith("_bytes"), family.name


def test_a_scraper_may_ask_for_openmetrics(client: TestClient) -> None:
    reply = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert reply.text.endswith("# EOF\n")


def test_accept_is_not_read_without_end(client: TestClient) -> None:
    accept = "application/openmetrics-text; version=1.0.0"
    long = client.get("/metrics", headers={"Accept": accept + ", a/b" * 1000})
    assert long.headers["content-type"].startswith("text/plain")


def test_metrics_are_rendered_once_for_all_who_ask_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once for the first, and then in the same turn for those who have come since, none of whom gets an older
    text."""
    waits: list[float] = []
    rendered: list[int] = []
    sleep, registry = asyncio.sleep, CollectorRegistry()
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: (waits.append(seconds), sleep(0.01))[1])

    def encode(_: CollectorRegistry) -> bytes:
        rendered.append(len(rendered))
        return b"%d" % rendered[-1]

    async def ask() -> list[bytes]:
        text = MetricsText(registry, clock=lambda: 100.0)
        first = await text.render(encode, "a")
        left = asyncio.ensure_future(text.render(encode, "a"))
        later = [asyncio.ensure_future(text.render(encode, kind)) for kind in "aaab"]
        await sleep(0)
        left.cancel()  # a client that leaves takes the others' text from nobody
        return [first, *await asyncio.gather(*later)]

    assert asyncio.run(ask()) == [b"0", b"1", b"1", b"1", b"2"]
    assert waits == [0.25, 0.5]


@pytest.mark.parametrize("path", ["/livez", "/startup", "/v1/caption", "/v1/models", "/metrics"])
def test_a_query_is_bounded_before_it_is_parsed(client: TestClient, image: Png, path: str) -> None:
    """Whatever is at the path."""
    method = "POST" if path == "/v1/caption" else "GET"
    most = [f"prompt={'a' * (8192 - 7)}", "&".join(["seed="] * 32)]
    for query in most:
        assert client.request(method, f"{path}?{query}", content=image()).status_code != 414
    for query in (f"{most[0]}b", f"{most[1]}&seed=", "&" * 5000, "format=" + "%41" * 2800):
        reply = client.request(method, f"{path}?{query}", content=image())
        assert reply.status_code == 414
        assert "8192 bytes or 32 fields" in reply.text


def test_head_is_answered(client: TestClient) -> None:
    assert client.head("/livez").status_code == 200


@pytest.mark.parametrize("path", ["/livez", "/openapi.json"])
def test_a_wrong_method_names_the_right_ones(client: TestClient, path: str) -> None:
    reply = client.post(path)
    assert (reply.status_code, reply.json()["code"]) == (405, "method_not_allowed")
    assert set(reply.headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize(
    "path", ["/livez", "/readyz", "/health", "/startup", "/metrics", "/openapi.json", "/docs", "/"]
)
def test_every_reply_has_a_request_id(client: TestClient, path: str) -> None:
    assert client.get(path).headers["x-request-id"]
