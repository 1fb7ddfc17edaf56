"""What Prometheus can rely on: counters from zero, and names of APIs that tell captions from probes."""

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from support.servers.server_process import python

from snapcap.service.telemetry import start_metrics as startup_collector
from snapcap.warmup.artifacts.fetch import Result
from snapcap.warmup.artifacts.publish import Published
from snapcap.warmup.progress.status import StartupStatus


def values(client: TestClient, name: str) -> dict[tuple[str, ...], float]:
    """By the values of the labels, in the order of the labels' names."""
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    samples = [sample for sample in families[name].samples if sample.name == f"{name}_total"]
    return {tuple(value for _, value in sorted(each.labels.items())): each.value for each in samples}


def test_what_is_counted_from_zero_is_all_that_there_is() -> None:
    assert get_args(Result) == startup_collector.FETCH_RESULTS
    assert get_args(get_type_hints(Published)["result"]) == startup_collector.PUBLISH_RESULTS
    assert get_args(get_type_hints(StartupStatus.swapped)["result"]) == startup_collector.SWAP_RESULTS


def test_counters_of_artifacts_are_there_before_anything_happened(client: TestClient, services: Any) -> None:
    assert values(client, "snapcap_artifact_requests") == {
        (kind, result): 0 for kind in ("aot", "jit") for result in get_args(Result)
    }
    assert values(client, "snapcap_artifact_publish") == {
        (result,): 0 for result in startup_collector.PUBLISH_RESULTS
    }
    assert values(client, "snapcap_bucket_swaps") == {("swapped",): 0, ("mismatch",): 0, ("failed",): 0}
    services.status.swapped("mismatch")
    assert values(client, "snapcap_bucket_swaps") == {("swapped",): 0, ("mismatch",): 1, ("failed",): 0}


def test_counters_of_requests_are_there_before_the_first_request(client: TestClient) -> None:
    rejected = values(client, "snapcap_requests_rejected")
    assert set(rejected.values()) == {0}
    assert {("queue_full",), ("deadline_exceeded",), ("not_ready",)} < set(rejected)
    for name in ("snapcap_rows", "snapcap_padding_rows"):
        assert values(client, name) == {("encoder",): 0, ("decoder",): 0}


def test_rules_and_dashboard_name_the_apis_that_caption(client: TestClient, document: Any) -> None:
    app: Any = client.app
    apis = [
        app.routes.api_of(method.upper(), path.replace("{", "").replace("}", ""))
        for path, operations in document["paths"].items()
        for method in operations
    ]
    captions = frozenset(api.label for api in apis if api.captions)
    deploy = Path(__file__).parents[3] / "deploy"
    for file in ("prometheus/rules.yml", "grafana/snapcap.json"):
        named = set(re.findall(r'api[=!]~\\?"([\w|]+)', (deploy / file).read_text()))
        assert {frozenset(each.split("|")) for each in named} == {captions}


def test_probes_and_pages_are_counted_and_have_no_histogram(client: TestClient, image: Any) -> None:
    client.post("/v1/caption", content=image())
    for path in ("/livez", "/readyz", "/health", "/startup", "/", "/nowhere"):
        client.get(path)
    text = client.get("/metrics").text
    assert 'snapcap_requests_total{api="livez",code="200"} 1.0' in text
    timed = set(re.findall(r'snapcap_request_duration_seconds_count{api="(\w+)"}', text))
    assert timed == {"caption"}


def test_there_are_no_series_of_when_others_began() -> None:
    program = """
from prometheus_client import generate_latest
from snapcap.service.config.settings import Settings
from snapcap.service.server.http_process import assemble
from snapcap.warmup.progress.timeline import Timeline
services = assemble(Settings(), Timeline.since_exec())
services.metrics.request_ended("caption", 200, 0.1, captions=True)
services.captioner.close()
print(generate_latest(services.registry).decode())
"""
    run = python("-c", program)
    assert run.returncode == 0, run.stderr
    assert 'snapcap_request_duration_seconds_count{api="caption"} 1.0' in run.stdout
    assert "_created" not in run.stdout
