"""Simulates what a fast start is worth: replicas that follow their load, by how fast each is ready.

    python -m snapcap.benchmarks.autoscaling [--pod 1] [--seed 1] [--json FILE] [--png FILE]
    python -m snapcap.benchmarks.autoscaling --check

Every server gets the same arrivals. A request that comes when no replica has room waits, as in a balancer that
holds it. Nothing but the numbers of `replicas.py` and the arrivals decides what comes out. With --check a server
is started here, and a simulated one must be as fast under the same arrivals: exit status 1 where it is not.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from snapcap.benchmarks.autoscaling.arrivals import LOADS, Load
from snapcap.benchmarks.autoscaling.check import check
from snapcap.benchmarks.autoscaling.fleet import Autoscaler, Fleet, Outcome, Replica
from snapcap.benchmarks.autoscaling.replicas import measured
from snapcap.benchmarks.harness.arguments import add_files, make_parser, seconds
from snapcap.benchmarks.harness.measurements import percentile
from snapcap.benchmarks.report.charts import draw_fleets
from snapcap.benchmarks.report.tables import Report, number, percent

LATE_S = 5.0


def simulate(load: Load, replicas: Sequence[Replica], scaler: Autoscaler, seed: int) -> dict[str, Outcome]:
    """By title, what each makes of the same arrivals."""
    moments = list(load.moments(seed))
    return {each.title: Fleet(each, scaler, load.replicas).run(moments) for each in replicas}


def figures(outcome: Outcome) -> dict[str, float]:
    """p50 and p99 of a request in seconds, the share of those past five seconds, replica hours, starts."""
    ordered = sorted(outcome.latencies)
    late = sum(latency > LATE_S for latency in ordered)
    return {
        "requests": float(len(ordered)),
        "p50_s": percentile(ordered, 0.50),
        "p99_s": percentile(ordered, 0.99),
        "late": late / len(ordered),
        "replica_hours": outcome.replica_seconds / 3600,
        "starts": float(outcome.starts),
    }


def add_table(report: Report, load: Load, cases: Mapping[str, Mapping[str, float]]) -> None:
    rows = [
        [
            title,
            number(case["p50_s"], 3),
            number(case["p99_s"], 3),
            percent(case["late"]),
            number(case["replica_hours"], 2),
            number(case["starts"], 0),
        ]
        for title, case in cases.items()
    ]
    columns = ["", "p50 s", "p99 s", f"past {LATE_S:g} s", "replica hours", "starts"]
    count = next(iter(cases.values()))["requests"]
    report.add(load.title, columns, rows, f"{count:.0f} requests in {load.seconds / 3600:g} h")


def main() -> int:
    parser = make_parser(__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    if options.check:
        return check(options)
    scaler, replicas = Autoscaler(pod=options.pod), measured()
    report, results = Report(), {}
    starts = [
        [each.title, number(each.start), number(each.lone * 1000, 1), number(each.rate, 0)] for each in replicas
    ]
    report.add("The servers, on two CPUs", ["", "start s", "a lone caption ms", "captions/s"], starts)
    for load in LOADS:
        results[load.title] = {
            title: figures(outcome) for title, outcome in simulate(load, replicas, scaler, options.seed).items()
        }
        add_table(report, load, results[load.title])
    if options.png is not None:
        draw_fleets(results, options.png, "p99 of a request", LATE_S)
    report.write(options.json, {"benchmark": "autoscaling", "pod_s": scaler.pod, "loads": results})
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "from the decision to start a replica until its process is executed (default: %(default)s)"
    parser.add_argument("--pod", type=seconds, default=1.0, metavar="SECONDS", help=text)
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals (default: %(default)s)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw p99 of each load and server")
    parser.add_argument("--check", action="store_true", help="hold one simulated replica against a real one")
    add_files(parser)


if __name__ == "__main__":
    raise SystemExit(main())
