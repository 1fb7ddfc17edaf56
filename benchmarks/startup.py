"""Measures starts, from exec to the first caption, of this server beside the field's ways to start.

Every run is a fresh process with fresh compiler caches and a warm page cache, or an empty one with --cold-disk.
The cases take turns. Artifact sets are built first if a case needs one. A wrong caption is an error, not a result.
"""

import argparse
import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from snapcap.benchmarks.contenders import PEERS
from snapcap.benchmarks.harness.arguments import add_cases, add_serve, count, drop_page_cache, require_drop
from snapcap.benchmarks.harness.load import SERVING_COMPILES
from snapcap.benchmarks.harness.marks import read_marks, read_result
from snapcap.benchmarks.harness.moto_store import S3Artifacts, s3_artifacts
from snapcap.benchmarks.harness.processes import (
    children,
    descendants,
    kernel_counts_children,
    own_parts,
    peak_host_bytes,
)
from snapcap.benchmarks.harness.report import Report, Samples, figures_of, number, ratio
from snapcap.benchmarks.harness.server import (
    SNAPCAP_API,
    START_LIMIT_S,
    Endpoint,
    Server,
    run_measured,
    serving,
    steady_caption,
)
from snapcap.benchmarks.harness.workload import (
    FIRST_IMAGE,
    SNAPCAP,
    UNPREPARED,
    Workload,
    build_store,
    fresh_caches,
    open_workload,
    scratch,
    serve_command,
)
from snapcap.benchmarks.waterfall import (
    CAPTION,
    HTTP,
    Bar,
    Segment,
    draw_waterfall,
    from_marks,
    from_startup,
    seconds_by_name,
)

# On the terminal, a phase below this share of its start is part of "the rest". The JSON has all phases.
SHOWN_SHARE = 0.01
FLOOR, IMPORT_TORCH = "floor", "import-torch"
PEER, ONNX = "transformers-eager", "onnxruntime"
PUBLISHED = "aot-s3-weights"
S3 = ("aot-s3", PUBLISHED)
# Cases that caption one image without a server. Their total is the time from exec to exit.
COMMAND, LIBRARY = "command", "library"
TITLES = {
    FLOOR: "floor: import torch, device, weights",
    IMPORT_TORCH: "python -c 'import torch'",
    "eager": "snapcap, eager",
    "aot": "snapcap, aot, folder store",
    "aot-s3": "snapcap, aot, S3, nothing cached",
    PUBLISHED: "snapcap, aot, S3 with weights, nothing cached",
    "cold": "snapcap, empty store",
    COMMAND: "snapcap caption one.jpg, to its exit",
    LIBRARY: "Captioner(model)(image), to its exit",
    **{name: peer.title for name, peer in PEERS.items()},
}
DEFAULT = (FLOOR, "aot", "eager", "cold", PEER, ONNX)
_LIBRARY = """
import sys
from snapcap import Captioner
model, cache, device, image = sys.argv[1:]
with Captioner(model, cache_dir=cache, device=device) as captioner:
    print(captioner(image))
"""


@dataclass
class Start:
    """The measurements of a start.

    total: seconds since the spawn, to which the segments sum.
    values: all numbers that are quoted as a median over the runs.
    facts: other observations.
    """

    total: float
    segments: list[Segment]
    values: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def measured(self) -> dict[str, float]:
        """Returns all numbers by name. Phases are named ``phase NAME``."""
        phases = {f"phase {name}": seconds for name, seconds in seconds_by_name(self.segments).items()}
        return {"total": self.total, **self.values, **phases}


def start_script(command: Sequence[str], extra: Mapping[str, str], last: str) -> Start:
    """Runs a child that marks its own start and ends. Its last mark is the total."""
    spawned, lines = run_measured(command, START_LIMIT_S, extra)
    marks, result = read_marks(lines), read_result(lines)
    if not marks or marks[-1][1] != last:
        raise RuntimeError(f"the child did not come to {last!r}: {lines[-1:]}")
    total = marks[-1][0] - spawned
    numbers = {name: float(value) for name, value in result.items() if isinstance(value, int | float)}
    return Start(total, from_marks(marks, spawned, total, last), numbers)


def caption_once(command: Sequence[str], caption: str | None, extra: Mapping[str, str]) -> Start:
    """Runs a program that prints a caption and ends. The caption of random weights is None.

    Raises:
        RuntimeError: the program failed, or printed another caption.
    """
    began = time.monotonic()
    lines = run_measured(command, START_LIMIT_S, extra).lines
    total = time.monotonic() - began
    if caption is not None and caption not in "\n".join(lines):
        raise RuntimeError(f"a wrong caption: {lines[-1:]}")
    return Start(total, [Segment("to its exit", 0.0, total)])


@dataclass(frozen=True)
class ServerStart:
    """The way to start and ask a server."""

    command: tuple[str, ...]
    workload: Workload
    counts_children: bool
    environment: Mapping[str, str]
    api: Endpoint = SNAPCAP_API
    check: Callable[[Mapping[str, Any]], None] = lambda _startup: None

    def run(self) -> Start:
        with serving(self.command, self.api, self.environment) as server:
            try:
                start = self._first_captions(server)
            except OSError as error:
                server.check()  # raises with the server's exit, if it has ended
                raise RuntimeError(f"{error}: {server.last_line()}") from error
            # The kernel counts children, so a child that has ended is known without having been seen.
            parts = own_parts(server.pid) if self.api is SNAPCAP_API else []
            started = children(server.pid, self.counts_children, parts)
            self._memory(server, parts, start)
            start.facts["children"] = {"ended": started.ended, "alive": list(started.alive), "none": started.none}
            return start

    def _first_captions(self, server: Server) -> Start:
        image, _ = self.workload.first_image
        values: dict[str, float] = {}
        connection = server.connect()
        snapcap = self.api is SNAPCAP_API
        if snapcap:
            connection.request("/livez")
            values["live"] = server.seconds()
        server.wait_ready(connection)
        values["ready"] = server.seconds()
        reply = server.caption(connection, image)
        total = values["first_caption"] = server.seconds()
        self.workload.check(reply.json())
        startup = connection.request("/startup").json() if snapcap else {}
        steady = steady_caption(server, connection, image)
        values["first_to_steady"] = (total - values["ready"]) / steady
        values["steady_ms"] = steady * 1000
        connection.close()
        if not snapcap:
            marks = [*read_marks(server.log().splitlines()), (server.spawned + values["ready"], HTTP)]
            return Start(total, from_marks(marks, server.spawned, total, CAPTION), values)
        self.check(startup)
        values["compiles_serving"] = server.metrics().get(SERVING_COMPILES, 0.0)
        return Start(total, from_startup(startup, total), values, {"startup": without_places(startup)})

    def _memory(self, server: Server, parts: list[int], start: Start) -> None:
        """Adds the memory of the server and its own processes. A peer's workers count, a build's compilers do
        not."""
        pids = [server.pid, *parts]
        if self.api is not SNAPCAP_API:
            pids += [pid for pid, _ in descendants(server.pid)]
        peaks = [peak_host_bytes(pid) for pid in pids]
        if peaks[0] is not None:
            start.values["peak_host_mib"] = sum(peak for peak in peaks if peak is not None) / (1 << 20)


def without_places(startup: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `/startup` says of artifacts and weights, without folders or hosts of the measured machine."""
    kept = ("kind", "result", "seconds", "bytes_fetched")
    found = {name: startup[name] or {} for name in ("artifacts", "weights")}
    return {name: {each: what[each] for each in kept if each in what} for name, what in found.items()}


def expect(backend: str, later: bool = False) -> Callable[[Mapping[str, Any]], None]:
    """Returns a check that a start serves ``backend`` in every bucket. With ``later``, buckets may be warmed after
    READY."""
    expected = {"warm", "eager", "captured"} | ({"pending"} if later else set())

    def check(startup: Mapping[str, Any]) -> None:
        backends = {bucket["backend"] for bucket in startup["buckets"]}
        states = {bucket["state"] for bucket in startup["buckets"]}
        if startup["tier"] != backend or backends != {backend} or not states <= expected:
            raise RuntimeError(f"expected {backend} in every bucket: {startup['buckets']}")

    return check


class UnavailableError(RuntimeError):
    """A case that cannot be run on this machine. The message is one line that says why."""


@dataclass
class Bench:
    """The state that all cases share.

    counts_children: this kernel counts the children of a process.
    cache: the artifact sets, kept between runs.
    work: files of this run.
    serve: further options of the server.
    stack: closes the resources that cases have opened.
    end: the moment at which the time is over, on `time.monotonic`.
    cold_disk: each start reads its files from the disk.
    """

    workload: Workload
    counts_children: bool
    device: str
    cache: Path
    work: Path
    serve: tuple[str, ...]
    stack: ExitStack
    end: float
    cold_disk: bool = False
    _remotes: dict[str, S3Artifacts] = field(default_factory=dict)

    def start(self, case: str) -> Start:
        """Starts one case in a fresh process with fresh caches.

        Raises:
            RuntimeError: it failed, or served something else than the case says.
        """
        with scratch() as folder:
            extra = fresh_caches(folder)
            if self.cold_disk:
                drop_page_cache()
            if case in (FLOOR, IMPORT_TORCH):
                return self._floor(case, extra)
            if case in (COMMAND, LIBRARY):
                return self._offline(case, extra)
            if case in PEERS:
                command = PEERS[case].command(self.workload, self.device, self.cache)
                return ServerStart(command, self.workload, self.counts_children, extra, PEERS[case].api).run()
            if case in S3:
                return self._from_s3(case, folder / "cache", extra)
            if case == "cold":
                return self._snapcap(self._serve(folder / "cache"), extra, "eager", later=True)
            strict = UNPREPARED if case == "eager" else ("--strict",)
            return self._snapcap(self._serve(self.cache, "--backend", case, *strict), extra, case)

    def prepare(self, case: str) -> None:
        """Makes the files that a case needs before its clock runs, an artifact set or an export, unless they exist.

        Raises:
            UnavailableError: the case cannot be run here.
        """
        reason = PEERS[case].unavailable(self.workload, self.device) if case in PEERS else ""
        if case in S3 and importlib.util.find_spec("moto") is None:
            reason = "not installed: moto, which stands in for S3"
        if reason:
            raise UnavailableError(reason)
        if case in PEERS:
            PEERS[case].prepare(self.workload, self.cache)
        elif case in ("aot", COMMAND, LIBRARY, *S3):
            build_store(self.cache, *self._model_options)

    @property
    def _model_options(self) -> tuple[str, ...]:
        return ("--model", str(self.workload.folder), "--device", self.device, *self.serve)

    def _serve(self, cache: Path, *options: str) -> tuple[str, ...]:
        return serve_command(*self._model_options, "--cache-dir", str(cache), *options)

    def _floor(self, case: str, extra: Mapping[str, str]) -> Start:
        if case == IMPORT_TORCH:
            marks = "from snapcap.benchmarks.harness.marks import mark; mark('interpreter')"
            script = f"{marks}; import torch; mark('import_torch')"
            return start_script([sys.executable, "-c", script], extra, "import_torch")
        command = [sys.executable, "-m", "snapcap.benchmarks.harness.floor"]
        command += ["--model", str(self.workload.folder), "--device", self.device]
        return start_script(command, extra, "load_weights")

    def _offline(self, case: str, extra: Mapping[str, str]) -> Start:
        image = self.workload.write_images(self.work / "images") / FIRST_IMAGE
        command = [*SNAPCAP, "caption", *self._model_options, "--cache-dir", str(self.cache), str(image)]
        if case == LIBRARY:
            model = (str(self.workload.folder), str(self.cache), self.device)
            command = [sys.executable, "-c", _LIBRARY, *model, str(image)]
        return caption_once(command, self.workload.first_image[1], extra)

    def _snapcap(
        self, command: tuple[str, ...], extra: Mapping[str, str], backend: str, later: bool = False
    ) -> Start:
        check = expect(backend, later)
        return ServerStart(command, self.workload, self.counts_children, extra, check=check).run()

    def _from_s3(self, case: str, empty: Path, extra: Mapping[str, str]) -> Start:
        """Starts from S3. With weights, the checkpoint is in S3 too, and this machine does not have it."""
        published = case == PUBLISHED
        if case not in self._remotes:
            options = self._model_options[2:] if published else self._model_options
            given = (options, self.workload.folder) if published else (options,)
            self._remotes[case] = self.stack.enter_context(s3_artifacts(self.cache, self.work, *given))
        remote = self._remotes[case]
        # A later `--model` overrides an earlier one.
        command = self._serve(empty, "--backend", "aot", "--strict", *remote.options)
        start = self._snapcap(command, {**extra, **remote.environment}, "aot")
        if published:
            fetched = start.facts["startup"]["weights"]
            if fetched["result"] != "hit" or not fetched["bytes_fetched"]:
                raise RuntimeError(f"the weights did not come from S3: {fetched}")
            start.values |= {"weights_mib": fetched["bytes_fetched"] / (1 << 20), "link_s": remote.link_s}
        return start


@dataclass
class CaseResult:
    """Holds all starts of a case, and the reason if there are no starts."""

    name: str
    starts: list[Start] = field(default_factory=list)
    problem: str = ""

    @property
    def title(self) -> str:
        return TITLES[self.name]

    @property
    def samples(self) -> Samples:
        samples = Samples()
        for start in self.starts:
            samples.add(start.measured())
        return samples

    @property
    def median(self) -> Start:
        """The start whose total is the median, or the faster one of the middle two.

        Its own phases sum to its own total, which medians of phases would not.
        """
        return sorted(self.starts, key=lambda start: start.total)[(len(self.starts) - 1) // 2]


class Session:
    """Runs cases until they are done or the time is over, and goes on when a case fails."""

    def __init__(self, bench: Bench, names: Iterable[str], runs: int) -> None:
        self.results = {name: CaseResult(name) for name in names}
        self._bench = bench
        self._runs = runs
        self._took: dict[str, float] = {}
        self._console = Console(stderr=True, highlight=False)

    def run(self) -> None:
        """Prepares every case, and runs all in turn, ``runs`` times."""
        for name, result in self.results.items():
            with self._attempt(result), self._console.status(f"preparing {name}"):
                self._bench.prepare(name)
        for name in (FLOOR, *PEERS):
            # Brings files into the page cache: the first import of a package reads the disk.
            if name in self.results:
                self._start(self.results[name], keep=False)
        for _ in range(self._runs):
            for result in self.results.values():
                self._start(result)
        for result in self.results.values():
            graphs = sum(start.values.get("compiles_serving", 0.0) for start in result.starts)
            if graphs:
                result.problem = f"failed: it compiled {graphs:.0f} graphs after READY"

    @contextlib.contextmanager
    def _attempt(self, result: CaseResult) -> Iterator[None]:
        """Records what keeps a case from being measured."""
        try:
            yield
        except UnavailableError as error:
            result.problem = str(error)
        except Exception as error:
            result.problem = "failed: " + (str(error).strip() or type(error).__name__).splitlines()[-1][:300]
            self._console.print(f"[red]{result.name}[/red] {error}")

    def _start(self, result: CaseResult, keep: bool = True) -> None:
        """Starts a case once, unless the case has failed or would not end within the time limit."""
        began, name = time.monotonic(), result.name
        if result.problem:
            return
        if began + self._took.get(name, 0.0) > self._bench.end:
            result.problem = "" if result.starts else "not run: the time limit"
            return
        with self._attempt(result):
            with self._console.status(f"{name}, run {len(result.starts) + 1} of {self._runs}"):
                start = self._bench.start(name)
            self._took[name] = time.monotonic() - began
            if keep:
                result.starts.append(start)
            self._console.print(f"{name}: {start.total:.2f} s{'' if keep else ' (not counted)'}")


def fill(report: Report, results: Sequence[CaseResult]) -> int:
    """Adds all tables, with the reasons for cases without starts. Returns the exit status."""
    started = [result for result in results if result.starts]
    samples = {result.name: result.samples for result in started}
    _phases(report, started)
    _children(report, started)
    _totals(report, started, samples)
    _between(report, samples)
    return report.add_problems({result.title: result.problem for result in results if result.problem})


def _totals(report: Report, results: Sequence[CaseResult], samples: Mapping[str, Samples]) -> None:
    floor, peer = (samples[name].median("total") if name in samples else None for name in (FLOOR, PEER))
    rows = []
    for result in results:
        case = samples[result.name]
        ready, total = case.median("ready"), case.need("total")
        row = [result.title, str(len(result.starts)), number(case.median("live")), number(ready), number(total)]
        row += [ratio(value, base) for base in (floor, peer) for value in (ready, total)]
        row += [number(case.median("steady_ms"), 1), ratio(case.median("first_to_steady"), 1.0)]
        rows.append([*row, number(case.median("peak_host_mib"), 0)])
    columns = ["exec → …, s", "n", "/livez", "READY", "caption", "READY /floor", "caption /floor", "READY /peer"]
    columns += ["caption /peer", "steady ms", "first /steady", "host MiB"]
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
        start = result.median
        phases = seconds_by_name(start.segments)
        shown = {name: value for name, value in phases.items() if value >= SHOWN_SHARE * start.total}
        rest = start.total - sum(shown.values())
        text = " + ".join(f"{name} {value:.2f}" for name, value in shown.items())
        text += f" + the rest {rest:.2f}" if rest >= 0.005 else ""
        rows.append([result.title, number(start.total), text])
    note = "Of the run with the median total, and they sum to it: what ran beside something else is not counted."
    report.add("Where the time went, s", ["", "total", "phases"], rows, note)


def _children(report: Report, results: Sequence[CaseResult]) -> None:
    rows = []
    for result in results:
        found = [start.facts["children"] for start in result.starts if "children" in start.facts]
        if not found or result.name in PEERS:
            continue
        none = sum(each["none"] for each in found)
        unknown = any(each["ended"] is None for each in found)
        by_kernel = "not counted by this kernel" if unknown else f"none in {none} of {len(found)} starts"
        alive = ", ".join(sorted({name for each in found for name in each["alive"]})) or "none"
        serving = max(start.values["compiles_serving"] for start in result.starts)
        rows.append([result.title, by_kernel, alive, f"{serving:.0f}"])
    columns = ["until the first captions", "child processes (kernel)", "alive", "graphs compiled after READY"]
    note = (
        "Kernel: page faults of children that have ended, as proc(5) counts them, and children alive; none means "
        "that no process was started, however short-lived, but the server's own (engine, decoding), whose "
        "children are counted too."
    )
    report.add("Processes started on the warm path", columns, rows, note)


def _between(report: Report, samples: Mapping[str, Samples]) -> None:
    """Adds ratios between the cases of this run that the table of starts does not have."""

    def median(case: str, name: str) -> float | None:
        return samples[case].median(name) if case in samples else None

    torch, ready = median(IMPORT_TORCH, "total"), median("aot", "ready")
    facts = [
        ["aot READY, to `import torch`", ratio(ready, torch)],
        ["aot READY, to ONNX Runtime's", ratio(ready, median(ONNX, "ready"))],
        ["aot first caption, to ONNX Runtime's", ratio(median("aot", "total"), median(ONNX, "total"))],
        ["aot lone caption, to ONNX Runtime's", ratio(median("aot", "steady_ms"), median(ONNX, "steady_ms"))],
        ["aot READY from S3 with weights, to a folder's", ratio(median(PUBLISHED, "ready"), ready)],
        ["aot READY, to eager READY", ratio(ready, median("eager", "ready"))],
        *(
            [f"{TITLES[case]}, to `import torch`", ratio(median(case, "total"), torch)]
            for case in (COMMAND, LIBRARY)
        ),
    ]
    report.add("Between the cases", ["what", "measured"], [row for row in facts if row[1]])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cases(parser, TITLES, DEFAULT)
    add_serve(parser)
    text = "number of starts of each case (default: %(default)s)"
    parser.add_argument("--runs", type=count, default=5, metavar="N", help=text)
    text = "drop the page cache before each start, so that files are read from the disk; needs root"
    parser.add_argument("--cold-disk", action="store_true", help=text)
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw a picture to FILE; needs snapcap[bench]")


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
        sets, serve = cache / "sets" / workload.name, tuple(options.serve.split())
        bench = Bench(workload, kernel_counts_children(), device, sets, work, serve, stack, end, options.cold_disk)
        session = Session(bench, options.cases, options.runs)
        report = Report()
        with contextlib.suppress(KeyboardInterrupt):  # shows the results so far
            session.run()
    results = list(session.results.values())
    status = fill(report, results)
    started = [result for result in results if result.starts]
    if options.png is not None and started:
        bars = [(each.title, each.median, len(each.starts)) for each in started]
        drawn = [Bar(title, start.segments, start.values.get("ready"), n) for title, start, n in bars]
        draw_waterfall(drawn, options.png, f"{options.model} on {device}")
    samples = {result.name: result.samples for result in started}
    report.write(
        options.json,
        figures_of(samples),
        benchmark="startup",
        model=options.model,
        device=device,
        cold_disk=options.cold_disk,
        problems={result.name: result.problem for result in results if result.problem},
        samples={name: case.values for name, case in samples.items()},
        children={each.name: [start.facts.get("children") for start in each.starts] for each in started},
    )
    return status
