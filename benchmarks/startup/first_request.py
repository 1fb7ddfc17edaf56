"""Measures the first captions after READY beside later ones that follow a pause: being first, or idleness.

    python -m snapcap.benchmarks.startup.first_request [--model demo] [--device auto] [--runs 30] [--cache FOLDER]
        [--json FILE]

Each run is a fresh `snapcap serve --backend aot`. One client asks for the same caption again and again, the first
time at the moment it sees READY, and at the end a few times after a pause: a poll of READY as before the first, or
nothing. A processor and a device that had nothing to do are slower for a moment, whoever asks.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from snapcap.benchmarks.harness.arguments import add_files, add_serve, count, make_parser
from snapcap.benchmarks.harness.common import build_store, fresh_caches, scratch, serve_command
from snapcap.benchmarks.harness.http_probe import Connection
from snapcap.benchmarks.harness.measurements import Samples, percentile
from snapcap.benchmarks.harness.server import Server, serving
from snapcap.benchmarks.harness.workload import MODELS, Workload, open_workload
from snapcap.benchmarks.report.tables import Report, number

STEADY = 20
POSITIONS = {0: "first", 1: "second", 2: "third"}
PAUSES = 8
IDLE_S = 0.05
# What the reply says of itself; the rest is the client's, the event loop's and what is between two processes.
PARTS = ("queue", "decode_image", "encode", "decode")


class Caption(NamedTuple):
    """Milliseconds as the client has them, and by part."""

    total: float
    parts: dict[str, float]


def ask(server: Server, connection: Connection, workload: Workload) -> Caption:
    began = time.monotonic()
    reply = server.caption(connection, workload.first_image[0])
    total = (time.monotonic() - began) * 1000
    content = reply.json()
    workload.check(content)
    parts = {name: content["timings"][name] for name in PARTS}
    return Caption(total, {**parts, "rest": total - sum(parts.values())})


def start(workload: Workload, command: tuple[str, ...]) -> dict[str, Caption]:
    """One start: the first captions, and the medians of those that follow a pause and of the steady ones."""
    with scratch() as folder, serving(command, extra=fresh_caches(folder)) as server:
        connection = server.connect()
        server.wait_ready(connection)
        captions = [ask(server, connection, workload) for _ in range(1 + STEADY)]

        def poll() -> None:
            server.wait_ready(connection)
            time.sleep(0.005)
            server.wait_ready(connection)

        def after(pause: Callable[[], None]) -> Caption:
            found = []
            for _ in range(PAUSES):
                pause()
                found.append(ask(server, connection, workload))
            return middle(found)

        seen = {name: captions[position] for position, name in POSITIONS.items()}
        seen |= {"after a poll": after(poll), "after 50 ms": after(lambda: time.sleep(IDLE_S))}
        connection.close()
        return {**seen, "steady": middle(captions[1:])}


def middle(captions: list[Caption]) -> Caption:
    parts = {name: statistics.median(each.parts[name] for each in captions) for name in captions[0].parts}
    return Caption(statistics.median(each.total for each in captions), parts)


def report(starts: list[dict[str, Caption]]) -> Report:
    rows = []
    for name in starts[0]:
        ratios = sorted(each[name].total / each["steady"].total for each in starts)
        parts = middle([each[name] for each in starts])
        rows.append(
            [
                name,
                number(parts.total, 2),
                *(f"{percentile(ratios, share):.3f}" for share in (0.5, 0.25, 0.75)),
                *(number(value, 2) for value in parts.parts.values()),
            ]
        )
    columns = ["", "ms", "/steady", "25 %", "75 %", "queue", "image", "encode", "steps", "rest"]
    note = f"Medians of {len(starts)} starts; steady: the median of the {STEADY} after the first."
    out = Report()
    out.add("The first captions after READY", columns, rows, note)
    return out


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--runs", type=count, default=30)
    add_files(parser)
    add_serve(parser)
    options = parser.parse_args()
    with scratch(options.cache) as cache:
        workload = open_workload(options.model, cache)
        sets = cache / "sets" / workload.name
        model = ("--model", str(workload.folder), "--device", options.device, *options.serve.split())
        build_store(sets, *model)
        command = serve_command(*model, "--cache-dir", str(sets), "--backend", "aot", "--strict")
        starts = [start(workload, command) for _ in range(options.runs)]
    samples = Samples()
    for each in starts:
        samples.add({name: caption.total for name, caption in each.items()})
    report(starts).write(options.json, {"model": options.model, "milliseconds": samples.values})


if __name__ == "__main__":
    main()
