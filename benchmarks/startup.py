"""Measures starts, from exec to the first caption, of this server beside the field's ways to start.

Every run is a fresh process with fresh compiler caches and a warm page cache, or an empty one with --cold-disk.
The cases take turns. Artifact sets are built first if a case needs one. A wrong caption is an error, not a result.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from snapcap.benchmarks.contenders import BACKENDS, PEERS, Contenders, UnavailableError, open_contenders
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
from snapcap.benchmarks.harness.workload import Workload, fresh_caches, scratch, serve_command
from snapcap.warmup.progress.timeline import BESIDE

# Names of the time in which no phase runs: until /livez, until READY, and until the first caption.
HTTP, WAIT, CAPTION = "http", "other", "first_caption"
# On the terminal, a phase below this share of its start is part of "the rest". The JSON has all phases.
SHOWN_SHARE = 0.01
FLOOR, IMPORT_TORCH = "floor", "import-torch"
PEER = "transformers-eager"
PUBLISHED = "aot-s3-weights"
COLD = "cold"
TITLES = {
    FLOOR: "floor: import torch, device, weights",
    IMPORT_TORCH: "python -c 'import torch'",
    "eager": "snapcap, eager",
    "aot": "snapcap, aot, folder store",
    PUBLISHED: "snapcap, aot, S3 with weights, nothing cached",
    COLD: "snapcap, empty store",
    **{name: peer.title for name, peer in PEERS.items()},
}
DEFAULT = (FLOOR, "aot", "eager", COLD, PEER, "onnxruntime")


@dataclass(frozen=True)
class Segment:
    """A stretch of the start, in seconds since the process was spawned."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def from_marks(marks: Sequence[tuple[float, str]], spawned: float, total: float, rest: str) -> list[Segment]:
    """Returns the stretches between a child's marks. The time from the last mark until ``total`` is called
    ``rest``.

    ``spawned`` is on the clock of the marks, ``total`` in seconds since then.
    """
    segments, begin = [], 0.0
    for moment, name in marks:
        end = min(max(moment - spawned, begin), total)
        segments.append(Segment(name, begin, end))
        begin = end
    if total > begin or not segments:
        segments.append(Segment(rest, begin, total))
    return _merged(segments)


def from_startup(startup: Mapping[str, Any], total: float) -> list[Segment]:
    """Returns the stretches of a snapcap start from its ``/startup``, up to ``total`` seconds after the spawn.

    Phases overlap. Each instant belongs to the phase that the start waits for: a phase of the device thread before
    one that runs beside it, and then the phase that began last. An instant without a phase is ``http``, the
    server's own import, until /livez, ``other`` until READY, and ``first_caption`` after it.
    """
    phases = [
        Segment(phase["name"], min(phase["start"], total), min(phase["end"] or total, total))
        for phase in startup["phases"]
    ]
    marks = startup["marks"]
    live, ready = min(marks.get("live", total), total), min(marks.get("ready", total), total)
    cuts = sorted({0.0, total, live, ready, *(p.start for p in phases), *(p.end for p in phases)})
    segments = []
    for begin, end in pairwise(cuts):
        running = [phase for phase in phases if phase.start <= begin and phase.end >= end]
        if running:
            name = max(running, key=lambda phase: (phase.name not in BESIDE, phase.start)).name
        else:
            name = HTTP if end <= live else WAIT if end <= ready else CAPTION
        segments.append(Segment(name, begin, end))
    return _merged(segments)


def seconds_by_name(segments: Iterable[Segment]) -> dict[str, float]:
    """Returns the total seconds of each name, in order of first appearance."""
    totals: dict[str, float] = {}
    for segment in segments:
        totals[segment.name] = totals.get(segment.name, 0.0) + segment.seconds
    return totals


def _merged(segments: Iterable[Segment]) -> list[Segment]:
    """Returns the stretches without empty ones, and with neighbours of the same name joined."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and merged[-1].name == segment.name:
            merged[-1] = Segment(segment.name, merged[-1].start, segment.end)
        elif segment.end > segment.start:
            merged.append(segment)
    return merged


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
    expected = {"loaded", "warm", "eager", "captured"} | ({"pending"} if later else set())

    def check(startup: Mapping[str, Any]) -> None:
        backends = {bucket["backend"] for bucket in startup["buckets"]}
        states = {bucket["state"] for bucket in startup["buckets"]}
        if startup["tier"] != backend or backends != {backend} or not states <= expected:
            raise RuntimeError(f"expected {backend} in every bucket: {startup['buckets']}")

    return check


@dataclass
class Bench:
    """The state that all cases share.

    counts_children: this kernel counts the children of a process.
    work: files of this run.
    stack: closes the resources that cases have opened.
    cold_disk: each start reads its files from the disk.
    """

    contenders: Contenders
    counts_children: bool
    work: Path
    stack: ExitStack
    cold_disk: bool = False
    _remote: S3Artifacts | None = None

    def start(self, case: str) -> Start:
        """Starts one case in a fresh process with fresh caches.

        Raises:
            UnavailableError: the case cannot be run here.
            RuntimeError: it failed, or served something else than the case says.
        """
        with scratch() as folder:
            extra, contenders = fresh_caches(folder), self.contenders
            if self.cold_disk:
                drop_page_cache()
            if case in (FLOOR, IMPORT_TORCH):
                return self._floor(case, extra)
            if case == PUBLISHED:
                return self._from_s3(folder / "cache", extra)
            if case == COLD:
                options = (*contenders.model_options, "--cache-dir", str(folder / "cache"))
                return self._serve(serve_command(*options), extra, check=expect("eager", later=True))
            command, api = contenders.command(case)
            check = expect(case) if case in BACKENDS else lambda _startup: None
            return self._serve(command, extra, api=api, check=check)

    def _serve(self, command: tuple[str, ...], extra: Mapping[str, str], **further: Any) -> Start:
        return ServerStart(command, self.contenders.workload, self.counts_children, extra, **further).run()

    def _floor(self, case: str, extra: Mapping[str, str]) -> Start:
        if case == IMPORT_TORCH:
            marks = "from snapcap.benchmarks.harness.marks import mark; mark('interpreter')"
            script = f"{marks}; import torch; mark('import_torch')"
            return start_script([sys.executable, "-c", script], extra, "import_torch")
        command = [sys.executable, "-m", "snapcap.benchmarks.harness.floor"]
        command += ["--model", str(self.contenders.workload.folder), "--device", self.contenders.device]
        return start_script(command, extra, "load_weights")

    def _from_s3(self, empty: Path, extra: Mapping[str, str]) -> Start:
        """Starts from packages, checkpoint and weights in S3. This machine does not have them."""
        contenders = self.contenders
        if importlib.util.find_spec("moto") is None:
            raise UnavailableError("not installed: moto, which stands in for S3")
        if self._remote is None:
            given = (contenders.sets, self.work, contenders.model_options[2:], contenders.workload.folder)
            self._remote = self.stack.enter_context(s3_artifacts(*given))
        # A later option overrides an earlier one.
        options = (*contenders.options("aot"), "--cache-dir", str(empty), *self._remote.options)
        environment = {**extra, **self._remote.environment}
        start = self._serve(serve_command(*options), environment, check=expect("aot"))
        fetched = start.facts["startup"]["weights"]
        if fetched["result"] != "hit" or not fetched["bytes_fetched"]:
            raise RuntimeError(f"the weights did not come from S3: {fetched}")
        start.values["weights_mib"] = fetched["bytes_fetched"] / (1 << 20)
        return start


def median_start(starts: Sequence[Start]) -> Start:
    """Returns the start whose total is the median, or the faster one of the middle two.

    Its own phases sum to its own total, which medians of phases would not.
    """
    return sorted(starts, key=lambda start: start.total)[(len(starts) - 1) // 2]


def fill(report: Report, starts: Mapping[str, Sequence[Start]], samples: Mapping[str, Samples]) -> None:
    """Adds all tables."""
    _phases(report, starts)
    _children(report, starts)
    _totals(report, samples)


def _totals(report: Report, samples: Mapping[str, Samples]) -> None:
    floor, peer = (samples[name].median("total") if name in samples else None for name in (FLOOR, PEER))
    rows = []
    for name, case in samples.items():
        ready, total = case.median("ready"), case.need("total")
        row = [
            TITLES[name],
            str(len(case.values["total"])),
            number(case.median("live")),
            number(ready),
            number(total),
        ]
        row += [ratio(value, base) for base in (floor, peer) for value in (ready, total)]
        row += [number(case.median("steady_ms"), 1), ratio(case.median("first_to_steady"), 1.0)]
        rows.append([*row, number(case.median("peak_host_mib"), 0)])
    columns = ["exec → …, s", "n", "/livez", "READY", "caption", "READY /floor", "caption /floor", "READY /peer"]
    columns += ["caption /peer", "steady ms", "first /steady", "host MiB"]
    note = (
        "Medians of alternating runs, each a fresh process with fresh caches (and with --cold-disk an empty page "
        "cache), seconds since its spawn. caption: "
        "the first caption, for the floor and `import torch` their end. /peer: to the first caption of FastAPI + "
        "transformers, unbatched. steady: a lone caption when warm; first: the one asked for at READY. host: "
        "VmHWM, the sum over a server's processes, which counts what they share more than once."
    )
    report.add("Cold start", columns, rows, note)


def _phases(report: Report, starts: Mapping[str, Sequence[Start]]) -> None:
    rows = []
    for name, found in starts.items():
        start = median_start(found)
        phases = seconds_by_name(start.segments)
        shown = {name: value for name, value in phases.items() if value >= SHOWN_SHARE * start.total}
        rest = start.total - sum(shown.values())
        text = " + ".join(f"{name} {value:.2f}" for name, value in shown.items())
        text += f" + the rest {rest:.2f}" if rest >= 0.005 else ""
        rows.append([TITLES[name], number(start.total), text])
    note = "Of the run with the median total, and they sum to it: what ran beside something else is not counted."
    report.add("Where the time went, s", ["", "total", "phases"], rows, note)


def _children(report: Report, starts: Mapping[str, Sequence[Start]]) -> None:
    rows = []
    for name, own in starts.items():
        found = [start.facts["children"] for start in own if "children" in start.facts]
        if not found or name in PEERS:
            continue
        none = sum(each["none"] for each in found)
        unknown = any(each["ended"] is None for each in found)
        by_kernel = "not counted by this kernel" if unknown else f"none in {none} of {len(found)} starts"
        alive = ", ".join(sorted({name for each in found for name in each["alive"]})) or "none"
        serving = max(start.values["compiles_serving"] for start in own)
        rows.append([TITLES[name], by_kernel, alive, f"{serving:.0f}"])
    columns = ["until the first captions", "child processes (kernel)", "alive", "graphs compiled after READY"]
    note = (
        "Kernel: page faults of children that have ended, as proc(5) counts them, and children alive; none means "
        "that no process was started, however short-lived, but the server's own (engine, decoding), whose "
        "children are counted too."
    )
    report.add("Processes started on the warm path", columns, rows, note)


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
    report = Report()
    with ExitStack() as stack:
        contenders = open_contenders(stack, options, device)
        work = stack.enter_context(scratch())
        bench = Bench(contenders, kernel_counts_children(), work, stack, options.cold_disk)
        # Brings files into the page cache: the first import of a package reads the disk.
        contenders.rounds([name for name in options.cases if name in (FLOOR, *PEERS)], 1, bench.start)
        starts = contenders.rounds(options.cases, options.runs, bench.start)
    judge(starts, contenders.problems)
    samples = {name: Samples.of(start.measured() for start in found) for name, found in starts.items()}
    fill(report, starts, samples)
    status = report.add_problems(contenders.problems, TITLES)
    report.write(
        options.json,
        figures_of(samples),
        benchmark="startup",
        model=options.model,
        device=device,
        cold_disk=options.cold_disk,
        problems=contenders.problems,
        samples={name: case.values for name, case in samples.items()},
        children={name: [start.facts.get("children") for start in found] for name, found in starts.items()},
    )
    return status


def judge(starts: Mapping[str, Sequence[Start]], problems: dict[str, str]) -> None:
    """Records a failure of each case that compiled after READY, however fast it was."""
    for name, found in starts.items():
        graphs = sum(start.values.get("compiles_serving", 0.0) for start in found)
        if graphs:
            problems[name] = f"failed: it compiled {graphs:.0f} graphs after READY"
