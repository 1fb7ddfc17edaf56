"""One real server, which starts cold, builds, swaps and refuses, seen by a real Prometheus.

Its metrics are those of the reference in deploy/prometheus, and each has moved; the rules record; and every query
of the dashboard finds something.
"""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from support.attacks.traffic import TIGHT, captions, refusals
from support.checkpoints.build_folders import nearly_built
from support.servers.prometheus import Prometheus, promtool, require
from support.servers.server_process import ServerProcess

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
# Samples that belong to a family.
SUFFIX = re.compile(r"_(total|bucket|count|sum)$")

STAYS_ZERO = {
    "snapcap_compile_events_total": "nothing may be compiled in an aot or eager server",
    "snapcap_compile_cache_total": "of the jit backend only",
    "snapcap_device_memory_allocated_bytes": "a CPU",
    "snapcap_artifact_fetch_bytes": "a folder, from which nothing is downloaded",
    "snapcap_requests_in_flight": "over when it is looked at; the traffic waits for a 1",
    "snapcap_body_memory_bytes": "over when it is looked at; the 429 shows that bodies held all of it",
    "snapcap_queue_depth": "over when it is looked at; the 429s show that it was full",
}
MAY_BE_ZERO = {"snapcap_engine_progress_age_seconds": "but for a moment between a beat and its answer"}
REFUSED_BY_NO_TRAFFIC = {
    "image_memory_full": "takes more large images at once than its queue has places",
    "image_fetches_full": "takes a host of images",
    "engine_channel_full": "takes an engine that does not read",
}
NO_SAMPLES = {"snapcap_eager_fallbacks_total": "of the jit backend only"}
OF_SEVERAL_MODELS = {"snapcap_model_state"}  # metrics that only a server of several models has
EMPTY_PANELS = {"Fallbacks": "of the jit backend only, and there should be none"}


@pytest.fixture(scope="module")
def server(
    built_cache: Path, tmp_path_factory: pytest.TempPathFactory, samples: dict[Path, str]
) -> Iterator[ServerProcess]:
    """It has seen all kinds of traffic, and has built, published and swapped in every bucket."""
    folder = tmp_path_factory.mktemp("observed")
    nearly_built(built_cache, folder / "store", missing=())
    options = ("--cache-dir", str(folder), "--buckets", "1,4", "--build", "local", *TIGHT)
    picture = next(iter(samples))
    with ServerProcess(*options, "--decode-processes", "1") as process:
        process.wait_for(lambda: process.call("/livez")[0] == 200)
        assert process.call("/v1/caption", picture.read_bytes())[0] == 503
        process.wait_ready()
        captions(process, picture)
        refusals(process, picture)
        late(process, picture)
        os.kill(process.decode_pids[0], signal.SIGKILL)
        process.wait_for(lambda: process.metrics()["snapcap_decode_process_deaths_total"] > 0)
        process.wait_for(lambda: (process.startup()["build"] or {}).get("state") == "published", seconds=300)
        yield process


def late(process: ServerProcess, picture: Path) -> None:
    """The one decode process is ended with the request whose image it has, and replaced."""
    (pid,) = process.decode_pids
    os.kill(pid, signal.SIGSTOP)
    assert process.call("/v1/caption?timeout=0.2", picture.read_bytes())[0] == 504
    process.wait_for(lambda: len(process.decode_pids) == 1 and process.decode_pids != [pid])


@pytest.fixture(scope="module")
def families(server: ServerProcess) -> dict[str, Metric]:
    """What /metrics has of ours, each by the name that it is asked for: a counter ends in _total. Not ours are the
    `process_*` that every program has, and so the engine process."""
    found = text_string_to_metric_families(server.call("/metrics")[1])
    ours = [
        family
        for family in found
        if family.name.startswith("snapcap_") and not family.name.startswith("snapcap_engine_process_")
    ]
    return {family.name + ("_total" if family.type == "counter" else ""): family for family in ours}


class Row(NamedTuple):
    """A metric in the reference."""

    name: str
    kind: str
    unit: str
    labels: str
    text: str


def reference() -> dict[str, Row]:
    lines = (DEPLOY / "prometheus" / "README.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `snapcap_")]
    rows = [Row(name.strip("`"), *rest) for name, *rest in cells]
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


def test_the_reference_is_what_the_server_has(families: dict[str, Metric]) -> None:
    rows = reference()
    assert set(rows) == set(families)
    for name, family in families.items():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        shown = ", ".join(f"`{label}`" for label in sorted(labels))
        row = rows[name]
        assert (row.kind, row.text) == (family.type, family.documentation), name
        assert row.labels == shown or name in NO_SAMPLES, (name, shown)
        expected = next((unit for unit in ("seconds", "bytes") if name.endswith(unit)), None)
        assert row.unit, name
        assert expected in (None, row.unit), name


def test_every_metric_has_moved(families: dict[str, Metric]) -> None:
    silent = {name for name, family in families.items() if not any(sample.value for sample in family.samples)}
    assert silent - MAY_BE_ZERO.keys() == {*STAYS_ZERO, *NO_SAMPLES}
    assert {name for name, family in families.items() if not family.samples} == set(NO_SAMPLES)


def test_every_kind_of_refusal_and_format_is_told_apart(families: dict[str, Metric]) -> None:
    def moved(name: str, label: str) -> set[str]:
        return {each.labels[label] for each in families[name].samples if each.value and label in each.labels}

    reasons = {each.labels["reason"] for each in families["snapcap_requests_rejected_total"].samples}
    assert reasons - moved("snapcap_requests_rejected_total", "reason") == set(REFUSED_BY_NO_TRAFFIC)
    assert moved("snapcap_image_decode_seconds", "format") == {"jpeg", "png", "webp"}
    assert moved("snapcap_bucket_swaps_total", "result") == {"swapped"}
    assert moved("snapcap_artifact_publish_total", "result") == {"published"}
    assert moved("snapcap_artifact_requests_total", "result") == {"miss"}
    assert {"caption", "huggingface", "other", "readyz"} <= moved("snapcap_requests_total", "api")


def test_promtool_finds_nothing_wrong_with_the_metrics(server: ServerProcess) -> None:
    checked = promtool("check", "metrics", text=server.call("/metrics")[1])
    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.fixture(scope="module")
def prometheus(
    server: ServerProcess, tmp_path_factory: pytest.TempPathFactory, samples: dict[Path, str]
) -> Iterator[Prometheus]:
    """It has scraped the server before and after traffic of every kind."""
    require("prometheus")
    picture = next(iter(samples))
    with Prometheus(tmp_path_factory.mktemp("prometheus"), server.port, RULES) as running:
        for again in range(2):
            running.wait_for(f"count_over_time(snapcap_ready[1m]) > {2 + 4 * again}")
            captions(server, picture)
            assert server.call("/v1/caption", b"not an image")[0] == 422
            assert server.call("/v1/caption?timeout=0.0001", picture.read_bytes())[0] == 504
        total = server.metrics()['snapcap_requests_total{api="caption",code="504"}']
        running.wait_for(f'snapcap_requests_total{{api="caption",code="504"}} >= {total}')
        running.wait_for("job:snapcap_request_errors:ratio_rate5m > 0")
        yield running


def test_rules_evaluate_and_every_recording_has_data(prometheus: Prometheus) -> None:
    rules = prometheus.rules()
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    for rule in rules:
        if rule["type"] == "recording":
            assert prometheus.query(rule["name"]), rule["name"]


def test_rules_ask_for_metrics_that_exist(prometheus: Prometheus, families: dict[str, Metric]) -> None:
    rules = prometheus.rules()
    recorded = {rule["name"] for rule in rules if rule["type"] == "recording"}
    asked = {name for rule in rules for name in re.findall(r"[\w:]*snapcap_[\w:]+", rule["query"])}
    unknown = {name for name in asked - recorded if name not in families and SUFFIX.sub("", name) not in families}
    assert unknown == OF_SEVERAL_MODELS


def test_a_server_without_trouble_raises_no_alarm(prometheus: Prometheus) -> None:
    """But for the errors that the test makes, and the requests that it has refused."""
    pending = {sample["metric"]["alertname"] for sample in prometheus.query("ALERTS")}
    assert pending <= {"SnapcapErrors", "SnapcapRejecting"}


def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana" / "snapcap.json").read_text())


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def filled_in(expression: str) -> str:
    """With Grafana's variables replaced as Grafana would, for "All" and a scrape interval of a second."""
    for name, value in {"$__rate_interval": "1m", "$job": ".*", "$instance": ".*"}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_every_query_of_the_dashboard_finds_something(prometheus: Prometheus, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        found = prometheus.query(filled_in(target["expr"]))
        assert bool(found) is (panel["title"] not in EMPTY_PANELS), target["expr"]
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            assert all(label in sample["metric"] for sample in found), label
        assert all(sample["value"][1] != "NaN" for sample in found), target["expr"]


def test_annotations_and_variables_are_queries_too(prometheus: Prometheus) -> None:
    for annotation in dashboard()["annotations"]["list"]:
        prometheus.query(filled_in(annotation["expr"]))
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            (inside,) = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"]).groups()[:1]
            label = variable["definition"].rpartition(", ")[2].rstrip(")")
            assert all(label in sample["metric"] for sample in prometheus.query(filled_in(inside)))
            assert variable["query"]["query"] == variable["definition"]
