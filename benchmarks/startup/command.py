"""Measures starts, from exec to the first caption, of this server beside the field's ways to start.

Every run is a fresh process with fresh compiler caches and a warm page cache, or an empty one with --cold-disk.
The cases take turns. Artifact sets are built first if a case needs one. A wrong caption is an error, not a result.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from snapcap.benchmarks.harness.arguments import add_cases, add_serve, count, require_drop
from snapcap.benchmarks.harness.measurements import Samples
from snapcap.benchmarks.harness.workload import open_workload, scratch
from snapcap.benchmarks.peers.commands import PEERS
from snapcap.benchmarks.report.charts import Bar, draw_waterfall, seconds_by_name
from snapcap.benchmarks.report.tables import Report, number, ratio
from snapcap.benchmarks.startup.bench import (
    DEFAULT,
    FLOOR,
    IMPORT_TORCH,
    ONCE,
    ONNX,
    PEER,
    PUBLISHED,
    TITLES,
    WARM,
    WATCHED,
    Bench,
    UnavailableError,
)
from snapcap.benchmarks.startup.start import Machine, Start

# On the terminal, a phase below this share of its start is part of "the rest". The JSON has all phases.
SHOWN_SHARE = 0.01


@dataclass
class CaseResult:
    """Holds all starts of a case, the watched start, and the reason if there are no starts."""

    name: str
    starts: list[Start] = field(default_factory=list)
    watched: Start | None = None
    problem: str = ""

    @property
    def title(self) -> str:
        return TITLES[self.name]


class Session:
    """Runs cases until they are done or the time is over, and goes on when a case fails."""

    def __init__(self, bench: Bench, names: Iterable[str], runs: int) -> None:
        self.results = {name: CaseResult(name) for name in names}
        self._bench = bench
        self._runs = runs
        self._took: dict[str, float] = {}
        self._console = Console(stderr=True, highlight=False)

    def run(self) -> None:
        """Runs all cases.

        Cases that compile from nothing run first, once, because the warm cases use their results. Then every case
        runs in turn, ``runs`` times. At the end, the warm cases run once more under watch.
        """
        for name in self.results:
            self._try(name, self._bench.check)
        for name in (name for name in (FLOOR, *PEERS) if name in self.results and name not in ONCE):
            self._try(name, self._bench.prepare)
            # Brings files into the page cache: the first import of a package reads the disk.
            self._start(name, keep=False)
        for name in (name for name in ("cold", *ONCE) if name in self.results):
            self._start(name, whole_build=name == "cold")
        for name in self.results:
            self._try(name, self._bench.prepare)
        for run in range(self._runs):
            for name, result in self.results.items():
                if len(result.starts) <= run and not (run and name in ONCE):
                    self._start(name)
        for name in (name for name in WATCHED if name in self.results and self.results[name].starts):
            self._start(name, watched=True)
            self._judge(self.results[name])

    def _try(self, name: str, step: Callable[[str], None]) -> None:
        """Runs a step before the first start of a case."""
        result = self.results[name]
        if result.problem:
            return
        try:
            with self._console.status(f"preparing {name}"):
                step(name)
        except UnavailableError as error:
            result.problem = str(error)
        except Exception as error:
            self._failed(result, error)

    def _judge(self, result: CaseResult) -> None:
        """Records a failure of a warm start that starts a compiler or compiles after READY, however fast it was."""
        starts = [*result.starts, *([result.watched] if result.watched else [])]
        compilers = {name for start in starts for name in start.facts["compilers"]}
        if result.name in WARM and compilers:
            self._failed(result, RuntimeError(f"it started {', '.join(sorted(compilers))}"))
        graphs = sum(start.values.get("compiles_serving", 0.0) for start in starts)
        if graphs:
            self._failed(result, RuntimeError(f"it compiled {graphs:.0f} graphs after READY"))

    def _start(self, name: str, keep: bool = True, watched: bool = False, whole_build: bool = False) -> None:
        """Starts a case once, unless the case has failed or would not end within the time limit."""
        result, began = self.results[name], time.monotonic()
        if result.problem:
            return
        if began + self._took.get(name, 0.0) > self._bench.end:
            if not result.starts:
                result.problem = "not run: the time limit"
            return
        try:
            with self._console.status(f"{name}, run {len(result.starts) + 1} of {self._runs}"):
                start = self._bench.start(name, watched, whole_build)
        except Exception as error:
            self._failed(result, error)
            return
        if not whole_build:
            self._took[name] = time.monotonic() - began
        if watched:
            result.watched = start
        elif keep:
            result.starts.append(start)
        self._console.print(f"{name}: {start.total:.2f} s{'' if keep and not watched else ' (not counted)'}")

    def _failed(self, result: CaseResult, error: Exception) -> None:
        result.problem = "failed: " + (str(error).strip() or type(error).__name__).splitlines()[-1][:300]
        self._console.print(f"[red]{result.name}[/red] {error}")


def samples_of(result: CaseResult) -> Samples:
    samples = Samples()
    for start in result.starts:
        samples.add(start.measured())
    return samples


def median_start(result: CaseResult) -> Start:
    """Returns the start whose total is the median, or the faster one of the middle two.

    Its own phases sum to its own total, which medians of phases would not.
    """
    return sorted(result.starts, key=lambda start: start.total)[(len(result.starts) - 1) // 2]


def fill(report: Report, results: Sequence[CaseResult]) -> int:
    """Adds all tables, with the reasons for cases without starts. Returns the exit status."""
    samples = {result.name: samples_of(result) for result in results if result.starts}
    _phases(report, results)
    _children(report, results)
    _cold(report, results)
    _totals(report, results, samples)
    status = report.add_problems({result.title: result.problem for result in results if result.problem})
    _targets(report, results, samples)
    return status


def _totals(report: Report, results: Sequence[CaseResult], samples: Mapping[str, Samples]) -> None:
    floor, peer = (samples[name].median("total") if name in samples else None for name in (FLOOR, PEER))
    rows = []
    for result in results:
        if not result.starts:
            continue
        case = samples[result.name]
        ready, total = case.median("ready"), case.need("total")
        rows.append(
            [
                result.title,
                str(len(result.starts)),
                number(case.median("live")),
                number(ready),
                number(total),
                ratio(ready, floor),
                ratio(total, floor),
                ratio(ready, peer),
                ratio(total, peer),
                number(case.median("steady_ms"), 1),
                ratio(case.median("first_to_steady"), 1.0),
                number(case.median("peak_host_mib"), 0),
                number(case.median("device_mib"), 0),
            ]
        )
    columns = ["exec → …, s", "n", "/livez", "READY", "caption", "READY /floor", "caption /floor", "READY /peer"]
    columns += ["caption /peer", "steady ms", "first /steady", "host MiB", "device MiB"]
    note = (
        "Medians of alternating runs, each a fresh process with fresh caches (and with --cold-disk an empty page "
        "cache), seconds since its spawn. caption: "
        "the first caption, for the floor and `import torch` their end. /peer: to the first caption of FastAPI + "
        "transformers eager. steady: a lone caption when warm; first: the one asked for at READY. host: VmHWM, the "
        "sum over a server's processes, which counts what they share more than once."
    )
    report.add("Cold start", columns, rows, note)


def _phases(report: Report, results: Sequence[CaseResult]) -> None:
    rows = []
    for result in results:
        if not result.starts:
            continue
        start = median_start(result)
        phases = seconds_by_name(start.segments)
        shown = {name: value for name, value in phases.items() if value >= SHOWN_SHARE * start.total}
        rest = start.total - sum(shown.values())
        text = " + ".join(f"{name} {value:.2f}" for name, value in shown.items())
        rows.append(
            [result.title, number(start.total), text + (f" + the rest {rest:.2f}" if rest >= 0.005 else "")]
        )
    note = "Of the run with the median total, and they sum to it: what ran beside something else is not counted."
    report.add("Where the time went, s", ["", "total", "phases"], rows, note)


def _children(report: Report, results: Sequence[CaseResult]) -> None:
    rows = []
    for result in results:
        watched = result.watched
        if watched is None:
            continue
        ended = [start.facts["children"]["ended"] for start in result.starts]
        none = sum(start.facts["children"]["none"] for start in result.starts)
        by_kernel = "not counted by this kernel" if None in ended else f"none in {none} of {len(ended)} starts"
        compilers = sorted({name for start in (*result.starts, watched) for name in start.facts["compilers"]})
        serving = max(start.values["compiles_serving"] for start in result.starts)
        programs = ", ".join(watched.facts["programs"]) or "none"
        rows.append([result.title, by_kernel, programs, ", ".join(compilers) or "none", f"{serving:.0f}"])
    every = max((result.watched.facts["watched_every_ms"] for result in results if result.watched), default=0.0)
    columns = ["until the first captions", "child processes (kernel)", f"seen (every {every:.0f} ms)", "compilers"]
    note = (
        "Kernel: page faults of children that have ended, as proc(5) counts them, and children alive; none means "
        "that no process was started, however short-lived, but the server's own (engine, decoding), whose "
        "children are counted too. Seen: the process table, in one more start."
    )
    report.add("Processes started on the warm path", [*columns, "graphs compiled after READY"], rows, note)


def _cold(report: Report, results: Iterable[CaseResult]) -> None:
    for result in results:
        for start in result.starts:
            cold = start.facts.get("cold")
            if cold is None:
                continue
            build = cold["build"]
            compiled = cold["all_compiled"]
            rows = [
                ["first caption, s", number(start.total)],
                ["everything compiled, s", number(compiled, 1) or "not within the time: " + _progress(build)],
                ["requests meanwhile", str(cold["requests"])],
                ["of these failed", str(cold["failed"]) + "".join(f"; {text}" for text in cold["failures"][:1])],
                [
                    "p50 / p99 / longest, ms",
                    " / ".join(number(cold.get(n), 0) for n in ("p50_ms", "p99_ms", "max_ms")),
                ],
            ]
            note = (
                "One client, 50 ms between its requests, each on a new connection, until all buckets are compiled."
            )
            report.add("Empty store: the build behind the server", ["", "measured"], rows, note)


def _progress(build: Mapping[str, Any]) -> str:
    return f"{build.get('state')}, {build.get('done', 0)} of {build.get('of', '?')} packages"


def _targets(report: Report, results: Sequence[CaseResult], samples: Mapping[str, Samples]) -> None:
    """Adds the goals of a start, each with the measured ratio. Some goals are for a GPU, some for a CPU."""

    def median(case: str, name: str) -> float | None:
        return samples[case].median(name) if case in samples else None

    floor, aot = median(FLOOR, "total"), median("aot", "ready")
    torch, eager = median(IMPORT_TORCH, "total"), median("eager", "ready")
    beyond = _beyond(median(PUBLISHED, "ready"), aot, median(PUBLISHED, "link_s"), median(PUBLISHED, "weights_mib"))
    facts = [
        ["aot READY, to the floor", ratio(aot, floor), "≤ 1.25 ×"],
        ["aot READY, to the peer's first caption", ratio(aot, median(PEER, "total")), "≤ 0.3 ×"],
        ["aot READY, to ONNX Runtime's", ratio(aot, median(ONNX, "ready")), "≤ 0.9 ×"],
        ["aot first caption, to ONNX Runtime's", ratio(median("aot", "total"), median(ONNX, "total")), "≤ 0.9 ×"],
        [
            "aot lone caption, to ONNX Runtime's",
            ratio(median("aot", "steady_ms"), median(ONNX, "steady_ms")),
            "≤ 0.8 ×",
        ],
        ["aot READY, to eager READY", ratio(aot, eager), "≤ 1.1 ×"],
        ["aot READY, to `import torch`", ratio(aot, torch), "≤ 1.5 ×"],
        ["aot READY from S3, to that from a folder", ratio(median("aot-s3", "ready"), aot), ""],
        ["aot READY from S3 with weights, beyond a folder's and the bytes ÷ the link", beyond, "≤ + 0.3 s"],
        ["empty store, first caption, to the floor", ratio(median("cold", "total"), floor), "≤ 1.3 ×"],
        ["empty store, everything compiled", _seconds(median("cold", "all_compiled")), "≤ 90 s on 16 CPUs"],
        ["empty store, failed requests", _failed(results), "0"],
        ["aot, first request after READY, to steady", ratio(median("aot", "first_to_steady"), 1.0), "≤ 1.05 ×"],
        ["aot, graphs compiled after READY", number(median("aot", "compiles_serving"), 0), "0"],
        ["eager /livez, to `import torch`", ratio(median("eager", "live"), torch), "≤ 0.5 ×"],
    ]
    report.add("Against the targets", ["what", "measured", "target"], [row for row in facts if row[1]])


def _beyond(ready: float | None, folder: float | None, link: float | None, mib: float | None) -> str:
    if ready is None or folder is None or link is None or mib is None:
        return ""
    return f"{ready - folder - link:+.2f} s (of {ready:.2f} - {folder:.2f} - {link:.2f} for {mib:.1f} MiB)"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} s"


def _failed(results: Iterable[CaseResult]) -> str:
    counts = [start.facts["cold"]["failed"] for r in results for start in r.starts if "cold" in start.facts]
    return str(sum(counts)) if counts else ""


def raw_cases(results: Iterable[CaseResult]) -> dict[str, Any]:
    """Returns every start, for `--json`."""
    return {
        result.name: {
            "title": result.title,
            "problem": result.problem,
            "medians": {name: samples_of(result).need(name) for name in samples_of(result).values},
            "starts": [asdict(start) for start in result.starts],
            "watched": None if result.watched is None else result.watched.facts,
        }
        for result in results
    }


def draw(results: Iterable[CaseResult], file: Path, title: str) -> None:
    """Draws the start-up waterfall: one bar for each case, cut into its phases."""
    bars = []
    for result in results:
        if result.starts:
            start = median_start(result)
            bars.append(Bar(result.title, start.segments, start.values.get("ready"), len(result.starts)))
    draw_waterfall(bars, file, title)


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
    status = fill(report, results)
    if options.png is not None:
        draw(results, options.png, f"{options.model} on {device}")
    raw = {
        "benchmark": "startup",
        "model": options.model,
        "device": device,
        "cold_disk": options.cold_disk,
    }
    report.write(options.json, {**raw, "cases": raw_cases(results)})
    return status
