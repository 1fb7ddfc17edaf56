"""Measures starts, from exec to the first caption, of this server beside the field's ways to start.

Every run is a fresh process with fresh compiler caches and a warm page cache, or an empty one with --cold-disk.
The cases take turns. Artifact sets are built first if a case needs one. A wrong caption is an error, not a result.
"""

import argparse
import contextlib
import time
from contextlib import ExitStack

from snapcap.benchmarks.harness.arguments import add_cases, add_serve, count
from snapcap.benchmarks.harness.common import scratch
from snapcap.benchmarks.harness.page_cache import require_drop
from snapcap.benchmarks.harness.workload import open_workload
from snapcap.benchmarks.report.tables import Report
from snapcap.benchmarks.startup import report as startup_report
from snapcap.benchmarks.startup.bench import DEFAULT, TITLES, Bench
from snapcap.benchmarks.startup.session import Session
from snapcap.benchmarks.startup.start import Machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cases(parser, TITLES, DEFAULT)
    add_serve(parser)
    text = "number of starts of each case (default: %(default)s)"
    parser.add_argument("--runs", type=count, default=5, metavar="N", help=text)
    text = "drop the page cache before each start, so that files are read from the disk; needs root"
    parser.add_argument("--cold-disk", action="store_true", help=text)


def run(options: argparse.Namespace, device: str) -> int:
    """Runs the measurement. The exit status is 0 if every case that can run here gave results.

    Raises:
        PageCacheError: ``--cold-disk`` is given, and the page cache cannot be dropped.
    """
    if options.cold_disk:
        require_drop()
    end = time.monotonic() + options.time_limit
    with ExitStack() as stack:
        cache = stack.enter_context(scratch(options.cache))
        work = stack.enter_context(scratch())
        workload = open_workload(options.model, cache)
        serve = tuple(options.serve.split())
        sets = cache / "sets" / workload.name
        session = Session(
            Bench(workload, Machine.look(device), device, sets, work, serve, stack, end, options.cold_disk),
            options.cases,
            options.runs,
        )
        report = Report()
        with contextlib.suppress(KeyboardInterrupt):  # shows the results so far
            session.run()
    results = list(session.results.values())
    status = startup_report.fill(report, results)
    if options.png is not None:
        startup_report.draw(results, options.png, f"{options.model} on {device}")
    raw = {
        "benchmark": "startup",
        "model": options.model,
        "device": device,
        "cold_disk": options.cold_disk,
    }
    report.write(options.json, {**raw, "cases": startup_report.raw(results)})
    return status
