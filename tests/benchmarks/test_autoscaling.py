"""The simulated fleet: by hand where it is small, and what must hold whatever the load."""

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from snapcap.benchmarks.autoscaling import (
    CLIENTS,
    LOADS,
    VLLM_START_S,
    Autoscaler,
    Fleet,
    Load,
    Replica,
    day,
    measured,
    on_off,
)
from snapcap.benchmarks.autoscaling import __name__ as MAIN
from snapcap.benchmarks.harness.report import setting

ROOT = Path(__file__).parents[2]
SCALER = Autoscaler(pod=1.0)
# A tenth of a second alone, ten a second at most, two at a time.
SLOW = Replica("slow", start=2.0, lone=0.1, rate=10.0, places=2)


def test_the_first_request_waits_for_the_first_replica() -> None:
    outcome = Fleet(SLOW, SCALER, least=0).run([5.0])
    assert outcome.latencies == pytest.approx([1.0 + 2.0 + 0.1])
    assert outcome.starts == 1


def test_requests_share_a_replica_up_to_its_places_and_wait_beyond() -> None:
    outcome = Fleet(SLOW, SCALER, least=1).run([1.0, 1.0, 1.0])
    # One alone takes 0.1 s; the second runs beside it, twice as long; the third waits for the first to end.
    assert sorted(outcome.latencies) == pytest.approx([0.1, 0.2, 0.1 + 0.2])


def test_a_replica_goes_when_it_was_not_needed_for_five_minutes() -> None:
    moments = [0.0, 1000.0]
    outcome = Fleet(SLOW, SCALER, least=0).run(moments)
    assert outcome.starts == 2
    assert outcome.latencies == pytest.approx([3.1, 3.1])
    assert SCALER.stays <= outcome.replica_seconds - 3.1 <= SCALER.stays + 2 * SCALER.every


def test_a_replica_stays_where_the_autoscaler_sees_requests_go_on() -> None:
    moments = [99.95 + 100.0 * turn for turn in range(30)]  # under way whenever it looks
    outcome = Fleet(SLOW, SCALER, least=0).run(moments)
    assert outcome.starts == 1
    assert outcome.latencies == pytest.approx([3.1] + [0.1] * 29)


def test_a_fleet_at_most_doubles_in_fifteen_seconds_and_has_a_limit() -> None:
    flood = [0.001 * turn for turn in range(20_000)]
    outcome = Fleet(SLOW, Autoscaler(most=5), least=1).run(flood)
    assert outcome.starts == 4
    assert len(outcome.latencies) == len(flood)
    # No faster than five replicas can: the first few seconds there are fewer.
    assert max(outcome.latencies) > len(flood) / (5 * SLOW.rate) - 20.0


def test_every_request_is_answered_once_and_none_faster_than_alone() -> None:
    load = Load("", on_off(30.0, 10.0, 50.0), 30.0, 300.0)
    moments = list(load.moments(3))
    outcome = Fleet(SLOW, SCALER, least=0).run(moments)
    assert len(outcome.latencies) == len(moments)
    assert min(outcome.latencies) >= SLOW.lone - 1e-9


def test_a_slower_start_is_never_better_where_it_is_waited_for() -> None:
    moments = list(Load("", on_off(1 / 600), 1 / 600, 6 * 3600.0).moments(1))
    kinds = [Replica(str(start), start, 0.01, 100.0, 8) for start in (0.5, 5.0, 50.0)]
    tails = [Fleet(each, SCALER, least=0).run(moments).figures()["p99_s"] for each in kinds]
    assert all(after > before for before, after in pairwise(tails))


def test_arrivals_have_their_rate_and_no_others() -> None:
    load = Load("", on_off(50.0, 10.0, 30.0), 50.0, 400.0)
    moments = list(load.moments(1))
    assert moments == list(load.moments(1)) != list(load.moments(2))
    assert all(before <= after for before, after in pairwise(moments))
    assert all(moment % 40.0 < 10.0 for moment in moments)
    assert len(moments) == pytest.approx(5000, abs=5 * math.sqrt(5000))


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.title)
def test_no_rate_is_above_its_peak(load: Load) -> None:
    rates = [load.rate(load.seconds * step / 5000) for step in range(5000)]
    assert 0 <= min(rates) <= max(rates) <= load.peak


def test_a_spike_multiplies_the_rate_of_its_hour() -> None:
    rate = day(1.0, 41.0, 1000.0, 5.0, 100.0, 10.0)
    assert rate(500.0) == pytest.approx(41.0)
    assert rate(95.0) == pytest.approx(5 * (1 + 40 * (1 - math.cos(2 * math.pi * 0.095)) / 2))


@pytest.fixture
def servers(tmp_path: Path) -> Path:
    """A result of `snapcap bench peers`."""
    figures = {}
    for case, start, rate in (("aot", 0.3, 180.0), ("onnxruntime", 0.4, 200.0), ("transformers-eager", 3.4, 18.0)):
        figures |= {f"{case}.ready": start, f"{case}.lone_ms": 10.0, f"{case}.captions_per_s": rate}
    (tmp_path / "servers.json").write_text(
        json.dumps({"command": "snapcap bench peers", "commit": "c", "figures": figures})
    )
    return tmp_path / "servers.json"


def test_the_servers_are_those_of_one_run(servers: Path) -> None:
    found = {each.title: each for each in measured(json.loads(servers.read_text()))}
    assert found["snapcap"] == Replica("snapcap", 0.3, 0.01, 180.0, CLIENTS)
    (published,) = (each for each in found.values() if "published" in each.title)
    assert (published.start, published.rate) == (VLLM_START_S, found["snapcap"].rate)


def test_the_command_prints_every_load(tmp_path: Path, servers: Path) -> None:
    command = [sys.executable, "-m", MAIN, "--servers", str(servers), "--json", str(tmp_path / "a.json")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "a.json").read_text())
    assert list(result["loads"]) == [load.title for load in LOADS]
    assert all(list(cases) == list(result["servers"]) for cases in result["loads"].values())
    assert all(load.title in run.stdout for load in LOADS)
    assert result["servers_from"] == "`snapcap bench peers` at c"
    assert result["command"].startswith("python -m snapcap.benchmarks.autoscaling --servers")


def test_the_setting_names_no_file_of_a_package() -> None:
    assert "__main__" not in setting()["command"]
