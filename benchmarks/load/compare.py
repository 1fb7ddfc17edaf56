"""Compares the captions/s of two servers that are already running, such as two commits of this one.

    python -m snapcap.benchmarks.load.compare 8101 8102 [--clients 16] [--rounds 40] [--seconds 3]

Both are given by their port on this machine. They take turns under the same load, the order changing from pair to
pair, so what disturbs the machine disturbs both. Quoted is the median of the pairs' ratios, and the interval that
holds the ratio's true median in at least 95 of 100 such measurements, whatever its distribution.
"""

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from snapcap.benchmarks.harness.arguments import add_files, count, make_parser, seconds
from snapcap.benchmarks.harness.common import scratch
from snapcap.benchmarks.harness.measurements import percentiles_ms
from snapcap.benchmarks.harness.workload import MODELS, open_workload
from snapcap.benchmarks.load.http_load import start_clients
from snapcap.benchmarks.report.tables import Report, number, per_second

WARM_UP_S = 2.0


def load(port: int, images: Path, clients: int, length: float) -> dict[str, float]:
    """One stretch of load: captions/s, and percentiles of latency in milliseconds.

    Raises:
        RuntimeError: a caption was wrong, or a request failed.
    """
    with start_clients(port, images, clients, length) as process:
        if process.stdout is None or process.stdout.readline() != "connected\n":
            raise RuntimeError(f"nothing answers on port {port}")
        replies: dict[str, Any] = json.loads(process.communicate("go\n")[0])
    latencies = replies["latencies"]
    if not latencies or any(replies[name] for name in ("errors", "wrong", "unanswered")):
        counts = {name: replies[name] for name in ("errors", "wrong", "unanswered", "statuses")}
        raise RuntimeError(f"the server on port {port} gave {len(latencies)} captions: {counts}")
    return {"captions_per_s": len(latencies) / replies["elapsed"], **percentiles_ms(latencies)}


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The least and greatest value that the median may have, at 95 %: of a binomial's order statistics (Conover,
    Practical Nonparametric Statistics, 3.2). With fewer than six values, all that was seen."""
    ordered, count = sorted(values), len(values)
    below, outside = 0.0, 0  # of the values, how many may lie on the median's other side by chance
    for lost in range(count // 2):
        below += math.comb(count, lost) / 2**count
        if below > 0.025:
            break
        outside = lost
    return ordered[outside], ordered[count - 1 - outside]


def measure(options: argparse.Namespace, images: Path) -> dict[int, list[dict[str, float]]]:
    """By port, one stretch of each pair."""
    samples: dict[int, list[dict[str, float]]] = {port: [] for port in options.ports}
    for port in options.ports:
        load(port, images, options.clients, WARM_UP_S)
    for turn in range(options.rounds):
        for port in options.ports if turn % 2 else reversed(options.ports):
            samples[port].append(load(port, images, options.clients, options.seconds))
    return samples


def report(samples: Mapping[int, Sequence[Mapping[str, float]]], title: str) -> Report:
    columns = ("captions_per_s", "p50_ms", "p99_ms")
    medians = {
        port: [statistics.median(each[name] for each in taken) for name in columns]
        for port, taken in samples.items()
    }
    first, second = samples
    rates = ([each["captions_per_s"] for each in samples[port]] for port in (first, second))
    ratios = [after / before for before, after in zip(*rates, strict=True)]
    least, most = median_interval(ratios)
    table = Report()
    table.add(
        title,
        ["port", "captions/s", "p50 ms", "p99 ms"],
        [
            [str(port), per_second(rate), number(p50, 1), number(p99, 1)]
            for port, (rate, p50, p99) in medians.items()
        ],
        f"captions/s, {second} ÷ {first}: {statistics.median(ratios):.3f}, at 95 % from {least:.3f} to {most:.3f}",
    )
    return table


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("ports", type=count, nargs=2, metavar="PORT", help="of the first server, and the second's")
    parser.add_argument("--model", choices=MODELS, default="demo", help="which both serve (default: %(default)s)")
    parser.add_argument("--clients", type=count, default=16, metavar="N", help="keep-alive (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=40, help="pairs of stretches (default: %(default)s)")
    parser.add_argument("--seconds", type=seconds, default=3.0, help="of each stretch (default: %(default)s)")
    add_files(parser)
    options = parser.parse_args()
    if len({*options.ports}) < 2:
        parser.error("two servers have two ports")
    with scratch(options.cache) as folder:
        images = open_workload(options.model, folder).write_images(folder / "images")
        samples = measure(options, images)
    title = f"{options.clients} clients, {options.rounds} pairs of {options.seconds:g} s each"
    report(samples, title).write(options.json, {"benchmark": "compare", "samples": samples})


if __name__ == "__main__":
    main()
