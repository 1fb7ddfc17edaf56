"""The rules by themselves, and the dashboard as a document."""

import json
import re
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.servers.prometheus import promtool

from snapcap.warmup.progress.timeline import PHASES

PROMETHEUS = Path(__file__).parents[2] / "deploy" / "prometheus"
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "snapcap.json"


@pytest.fixture
def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


@pytest.fixture
def alerts(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rule for rule in rules if "alert" in rule]


def test_promtool_takes_the_rules_and_the_configuration() -> None:
    for arguments in (("check", "rules", "--lint=all", "--lint-fatal"), ("check", "config")):
        file = "rules.yml" if "rules" in arguments else "prometheus.yml"
        checked = promtool(*arguments, PROMETHEUS / file)
        assert checked.returncode == 0, checked.stdout
        assert "SUCCESS" in checked.stdout


def test_the_rules_do_what_their_tests_say() -> None:
    tested = promtool("test", "rules", PROMETHEUS / "rules.test.yml")
    assert tested.returncode == 0, tested.stdout


def test_every_alert_is_tested_where_it_fires_and_where_it_does_not(alerts: list[dict[str, Any]]) -> None:
    tests = yaml.safe_load((PROMETHEUS / "rules.test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert fires == {alert["alert"] for alert in alerts}
    waits = {alert["alert"] for alert in alerts if "for" in alert}
    assert waits <= {case["alertname"] for case in cases if not case["exp_alerts"]}


def test_every_recording_is_tested(rules: list[dict[str, Any]]) -> None:
    tests = yaml.safe_load((PROMETHEUS / "rules.test.yml").read_text())["tests"]
    asked = {case["expr"] for test in tests for case in test.get("promql_expr_test", [])}
    assert {rule["record"] for rule in rules if "record" in rule} <= asked


def test_every_alert_says_what_it_is_and_what_to_do(alerts: list[dict[str, Any]]) -> None:
    assert len(alerts) > 10
    for alert in alerts:
        assert re.fullmatch(r"Snapcap[A-Z]\w+", alert["alert"])
        assert alert["labels"]["severity"] in ("critical", "warning")
        notes = alert["annotations"]
        assert set(notes) == {"summary", "description", "runbook"}
        assert not notes["summary"].endswith("."), alert["alert"]
        for sentence in (notes["description"], notes["runbook"]):
            assert re.match(r"[A-Z]|{{", sentence), alert["alert"]
            assert sentence.endswith("."), alert["alert"]


def test_the_readme_has_every_alert_with_its_severity(alerts: list[dict[str, Any]]) -> None:
    rows = re.findall(r"^\| (Snapcap\w+) \| .* \| (\w+) \|$", (PROMETHEUS / "README.md").read_text(), re.MULTILINE)
    assert rows == [(alert["alert"], alert["labels"]["severity"]) for alert in alerts]


def test_the_readme_has_every_phase_and_recording(rules: list[dict[str, Any]]) -> None:
    text = (PROMETHEUS / "README.md").read_text()
    (phases,) = re.findall(r"^The phases are (.*)\.$", text, re.MULTILINE)
    assert tuple(re.findall(r"\w+_\w+|interpreter|bind|rehearsal", phases)) == PHASES
    assert set(re.findall(r"`(\w+:\w+:\w+)`", text)) <= {rule.get("record") for rule in rules}


def test_the_prometheus_rule_is_what_the_readme_writes_from_the_rules() -> None:
    (command, file) = re.findall(
        r"^(\{ printf .*?\}) > (\S+)$", (PROMETHEUS / "README.md").read_text(), re.MULTILINE
    )[0]
    made = subprocess.run(["sh", "-c", command], cwd=PROMETHEUS, capture_output=True, text=True, check=True).stdout
    assert (PROMETHEUS / file).read_text() == made, "run the command in deploy/prometheus/README.md"
    document = yaml.safe_load(made)
    assert (document["apiVersion"], document["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert document["spec"] == yaml.safe_load((PROMETHEUS / "rules.yml").read_text())


def test_the_dashboard_is_laid_out_and_explained() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        box = panel["gridPos"]
        assert 0 <= box["x"] < box["x"] + box["w"] <= 24
        if panel["type"] == "row":
            continue
        assert re.match(r"[A-Z0-9].*\.$", panel["description"]), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all('job=~"$job", instance=~"$instance"' in target["expr"] for target in panel["targets"])
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below


@pytest.mark.parametrize("several", [False, True])
def test_the_table_of_servers_has_a_row_for_each_model(several: bool, tmp_path: Path) -> None:
    """Only a server of several models has the label `model` on the metric of its backend."""
    (panel,) = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["title"] == "Servers"]
    names = ("first", "second") if several else ("first",)
    where = 'job="snapcap", instance="a"'
    series, rows = [f'snapcap_build_info{{{where}, version="1", torch="2", python="3"}}'], []
    for name in names:
        model = f', model="{name}"'
        series.append(f'snapcap_model_info{{{where}{model}, device="cpu", dtype="float32"}}')
        series.append(f'snapcap_startup_tier{{{where}{model if several else ""}, backend="aot"}}')
        described = f'backend="aot", device="cpu", dtype="float32", python="3", torch="2", version="1"{model}'
        rows.append({"labels": f"{{{where}, {described}}}", "value": 1})
    (target,) = panel["targets"]
    expression = target["expr"].replace("$job", ".*").replace("$instance", ".*")
    test = {
        "input_series": [{"series": each, "values": "1"} for each in series],
        "promql_expr_test": [{"expr": expression, "eval_time": "0m", "exp_samples": rows}],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": [test]}))
    tested = promtool("test", "rules", tmp_path / "test.yml")
    assert tested.returncode == 0, tested.stdout
