"""Measures starts, from exec to the first caption, of this server beside the field's ways to start.

Every run is a fresh process with fresh compiler caches and a warm page cache, or an empty one with --cold-disk.
The cases take turns. Artifact sets are built first if a case needs one. A wrong caption is an error, not a result.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from snapcap.benchmarks.harness.workload import (
    FIRST_IMAGE,
    SNAPCAP,
    Workload,
    fresh_caches,
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
COLD = "cold"
# Cases that caption one image without a server. Their total is the time from exec to exit.
COMMAND, LIBRARY = "command", "library"
TITLES = {
    FLOOR: "floor: import torch, device, weights",
    IMPORT_TORCH: "python -c 'import torch'",
    "eager": "snapcap, eager",
    "aot": "snapcap, aot, folder store",
    PUBLISHED: "snapcap, aot, S3 with weights, nothing cached",
    COLD: "snapcap, empty store",
    COMMAND: "snapcap caption one.jpg, to its exit",
    LIBRARY: "Captioner(model)(image), to its exit",
    **{name: peer.title for name, peer in PEERS.items()},
}
DEFAULT = (FLOOR, "aot", "eager", COLD, PEER, ONNX)
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
            if case in (COMMAND, LIBRARY):
                return self._offline(case, extra)
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

    def _offline(self, case: str, extra: Mapping[str, str]) -> Start:
        contenders, image = self.contenders, str(self.contenders.images / FIRST_IMAGE)
        command = [*SNAPCAP, "caption", *contenders.model_options, "--cache-dir", str(contenders.sets), image]
        if case == LIBRARY:
            model = (str(contenders.workload.folder), str(contenders.sets), contenders.device)
            command = [sys.executable, "-c", _LIBRARY, *model, image]
        return caption_once(command, contenders.workload.first_image[1], extra)

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
    _between(report, samples)


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
    if options.png is not None and starts:
        bars = [(TITLES[name], median_start(found), len(found)) for name, found in starts.items()]
        drawn = [Bar(title, start.segments, start.values.get("ready"), n) for title, start, n in bars]
        draw_waterfall(drawn, options.png, f"{options.model} on {device}")
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
