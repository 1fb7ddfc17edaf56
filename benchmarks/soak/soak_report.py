"""Prints the table of a campaign, and judges whether it went well."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from snapcap.benchmarks.report.tables import Report
from snapcap.benchmarks.soak.bad_clients import BadClients
from snapcap.benchmarks.soak.campaign import Strike
from snapcap.benchmarks.soak.good_clients import Tally
from snapcap.benchmarks.soak.replica import Replica

_COUNTS = ["requests", "retried", "lost", "wrong"]
_COLUMNS = ["fault", "server", "at s", "recovered s", *_COUNTS, "/livez ms", "control ms", "peak MiB"]
_NOTE = (
    "recovered: until the server was ready, captioned rightly, and had what was broken. /livez: the worst while "
    "servers were up; control: that of a server that does nothing."
)


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"


def mib(count: float) -> str:
    return f"{count / (1 << 20):.0f}"


def row(strike: Strike) -> list[str]:
    recovered = "NEVER" if strike.recovered is None else f"{strike.recovered:.1f}"
    counts = [str(each) for each in (strike.requests, strike.retried, strike.lost, strike.wrong)]
    worst = [ms(strike.livez), ms(strike.control), mib(strike.peak)]
    return [strike.fault, strike.replica, f"{strike.at:.0f}", recovered, *counts, *worst]


def write(file: Path | None, strikes: list[Strike], totals: dict[str, Any], skipped: dict[str, str]) -> None:
    """Prints the tables. Also writes them if a file is given."""
    report = Report()
    report.add("Faults, in the order in which they were injected", _COLUMNS, [row(each) for each in strikes], _NOTE)
    report.add("Not injected", ["fault", "why"], [[name, why] for name, why in skipped.items()])
    report.add("The whole campaign", ["", "value"], [[name, str(value)] for name, value in totals.items()])
    report.write(file, {"strikes": [asdict(each) for each in strikes], "totals": totals, "skipped": skipped})


def totals(
    seed: int, seconds: float, tally: Tally, bad: BadClients, replicas: list[Replica], strikes: list[Strike]
) -> dict[str, Any]:
    """Returns the totals of the good clients, the bad clients and the servers."""
    answered = {str(status): count for status, count in sorted(bad.answered.items())}
    memory = {each.name: [value for _, value in each.memory] for each in replicas}
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "faults": len(strikes),
        "requests": tally.requests,
        "retried by clients": tally.retried,
        "lost": tally.lost,
        "wrong": tally.wrong,
        "slowest request s": round(tally.slowest, 1),
        "bad requests, by status": answered,
        "server starts": {each.name: each.starts for each in replicas},
        "exit statuses": {each.name: each.exits for each in replicas},
        "memory MiB: first, peak, last": {
            name: [mib(values[len(values) // 20]), mib(max(values)), mib(values[-1])]
            for name, values in memory.items()
            if values
        },
        "not recovered": [each.fault for each in strikes if each.recovered is None],
        "problems": tally.problems,
    }


def went_well(totals: dict[str, Any]) -> bool:
    """Returns whether no request was lost, no caption wrong, no server answered 500, and every server recovered."""
    failed = totals["lost"] or totals["wrong"] or totals["not recovered"] or not totals["ended well"]
    return not failed and "500" not in totals["bad requests, by status"]
