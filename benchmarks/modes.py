"""Measures the ways and modes of torch.compile: the cost of the first steps, and the time of later ones.

Each case is a fresh process with empty caches (`benchmarks/harness/compiled_case.py`). Seconds count from its
spawn. A case that restores reads what the cold case before it saved: torch's cache artifacts, and "as jit" the
libraries that the jit backend adds to them. Cases that are not "as jit" compile the plain regions, even if the
server has kernels of its own for them.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapcap.benchmarks.contenders import Turns, UnavailableError
from snapcap.benchmarks.harness.arguments import add_cases, count, counts
from snapcap.benchmarks.harness.compiled_case import COMPONENTS, How, Job, Mode, Setup
from snapcap.benchmarks.harness.marks import read_marks, read_result
from snapcap.benchmarks.harness.report import Report, Samples, number, ratio
from snapcap.benchmarks.harness.server import run_measured
from snapcap.benchmarks.harness.workload import FIRST_IMAGE, fresh_caches, open_workload, scratch
from snapcap.models.json_object import to_json

EAGER = "eager"
_TUNED: Mode = "max-autotune"
_REDUCED: Mode = "reduce-overhead"
_WHAT = {"encoder": "encode", "decoder": "step"}
CASE_LIMIT_S = 1800.0


@dataclass(frozen=True)
class Case:
    """A way to compile. ``restores`` names the case whose compiled code this one reads."""

    title: str
    how: How
    restores: str = ""
    cuda: bool = False  # the case needs a GPU


CASES = {
    EAGER: Case("eager", How("eager")),
    "full": Case("full model", How("full")),
    "full-restored": Case("full model, restored", How("full"), restores="full"),
    "hierarchical": Case("full model, nested regions", How("hierarchical")),
    "regional": Case("regional", How("regional")),
    "regional-restored": Case("regional, restored", How("regional"), restores="regional"),
    "jit": Case("regional as jit", How("jit")),
    "jit-restored": Case("regional as jit, restored", How("jit"), restores="jit"),
    "encoder": Case("regional, encoder alone", How("regional", only="encoder")),
    "decoder": Case("regional, decoder alone", How("regional", only="decoder")),
    "tuned-encoder": Case("regional, encoder max-autotune", How("regional", encoder_mode=_TUNED)),
    "tuned-decoder": Case("regional, decoder max-autotune", How("regional", decoder_mode=_TUNED)),
    "tuned": Case("regional, both max-autotune", How("regional", None, _TUNED, _TUNED)),
    "reduce-overhead": Case("full model, reduce-overhead", How("full", None, _REDUCED, _REDUCED), cuda=True),
}


def with_needed(names: Iterable[str]) -> list[str]:
    """Returns these cases, eager for comparison, and the cases that they restore, in order."""
    wanted = {EAGER, *names}
    wanted |= {CASES[name].restores for name in wanted}
    return [name for name in CASES if name in wanted]


def fill(
    out: Report,
    results: Mapping[str, Samples],
    tokens: Mapping[str, Sequence[int]],
    buckets: Sequence[int],
    runs: int,
) -> None:
    """Adds the tables of the cases in ``results``. Without eager there are no ratios, and tokens are not
    compared."""
    eager = results.get(EAGER, Samples())
    rows = []
    for name, samples in results.items():
        row = [CASES[name].title]
        for key in ("until_first_step", "until_all_buckets"):
            row += [number(samples.median(key), 1), ratio(samples.median(key), eager.median(key))]
        row += [number(_compile_seconds(samples, component), 1) for component in COMPONENTS]
        row.append(f"{samples.median('hits') or 0:.0f}/{samples.median('misses') or 0:.0f}")
        row += [number(samples.median(key), 0) for key in ("peak_host_mib", "device_peak_mib")]
        rows.append([*row, "" if EAGER not in tokens else "yes" if tokens[name] == tokens[EAGER] else "no"])
    columns = ["exec → …, s", "first step", "/eager", "all buckets", "/eager", "compile encoder s", "decoder s"]
    note = (
        f"medians of {runs} run(s); buckets {', '.join(map(str, buckets))}; first step: from spawn until the first "
        "images were encoded and one token was decoded; compile: the first calls of all buckets, less a later one; "
        "hits/misses: in torch's caches; memory: the most of the process until then, without compilers it starts; "
        "tokens: whether as eager"
    )
    out.add("What a start costs", [*columns, "hits/misses", "peak MiB", "GPU MiB", "tokens"], rows, note)
    cells = [(component, size) for component in COMPONENTS for size in buckets]
    for suffix, title in (("", "Later steps"), ("_graph", "Later steps, replayed as CUDA graphs")):
        rows = []
        for name, samples in results.items():
            row = [CASES[name].title]
            for component, size in cells:
                key = f"{component}_{size}{suffix}"
                row += [number(samples.median(key), 3), ratio(eager.median(key), samples.median(key))]
            if any(row[1:]):
                rows.append(row)
        columns = [column for component, size in cells for column in (f"{_WHAT[component]} × {size}", "faster")]
        out.add(title, ["", *columns], rows, "ms; faster: than eager of the same kind")


def _compile_seconds(samples: Samples, component: str) -> float | None:
    """Returns by how many seconds the first calls took longer than later ones."""
    first = samples.median(f"initial_{component}")
    keys = (key for key in samples.values if key.startswith(f"{component}_") and not key.endswith("_graph"))
    return None if first is None else max(first - sum(map(samples.need, keys)) / 1000, 0.0)


@dataclass
class Results(Turns):
    """The numbers and tokens of each case."""

    end: float
    problems: dict[str, str] = field(default_factory=dict)
    samples: dict[str, Samples] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def add(self, name: str, found: Mapping[str, Any]) -> None:
        numbers = {key: value for key, value in found.items() if isinstance(value, int | float)}
        self.samples.setdefault(name, Samples()).add(numbers)
        self.tokens[name] = found["tokens"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cases(parser, CASES, CASES)
    text = "number of fresh processes of each case (default: %(default)s)"
    parser.add_argument("--runs", type=count, default=1, metavar="N", help=text)
    text = "batch sizes that are compiled (default: %(default)s)"
    parser.add_argument("--buckets", type=counts, default="1,4", metavar="N,…", help=text)


def run(options: argparse.Namespace, device: str) -> int:
    """Runs the measurement. The exit status is 0 if every case that can run here gave results."""
    report = Report()
    with ExitStack() as stack:
        cache = stack.enter_context(scratch(options.cache))
        work = stack.enter_context(scratch())
        workload = open_workload(options.model, cache)
        images = workload.write_images(work / "images")
        setup = Setup(workload.folder, images / FIRST_IMAGE, device, tuple(options.buckets))
        end = time.monotonic() + options.time_limit
        results = measure_all(with_needed(options.cases), options.runs, setup, work, end)
    fill(report, results.samples, results.tokens, options.buckets, options.runs)
    titles = {name: case.title for name, case in CASES.items()}
    return report.end(options, device, results.problems, titles, results.samples, tokens=results.tokens)


def measure_all(names: Sequence[str], runs: int, setup: Setup, kept: Path, end: float) -> Results:
    """Runs every case once, and then all again, until ``end`` on `time.monotonic`."""
    results = Results(end)

    def run(name: str) -> None:
        case = CASES[name]
        if case.cuda and setup.device != "cuda":
            raise UnavailableError("needs a CUDA device")
        if case.restores in results.problems:
            raise UnavailableError(f"there is nothing to restore of {CASES[case.restores].title}")
        results.add(name, measure(name, setup, kept))

    results.rounds(names, runs, run)
    return results


def measure(name: str, setup: Setup, kept: Path) -> dict[str, Any]:
    """Runs a case in a process of its own. Returns its numbers, and the seconds until each of its marks.

    Raises:
        RuntimeError: the case failed, or took too long.
    """
    case = CASES[name]
    is_restored = any(other.restores == name for other in CASES.values())
    save = kept / name if is_restored else None
    restore = kept / case.restores if case.restores else None
    job = Job(setup, case.how, save, restore)
    command = (sys.executable, "-m", "snapcap.benchmarks.harness.compiled_case", to_json(job))
    with tempfile.TemporaryDirectory(prefix="snapcap-bench-", ignore_cleanup_errors=True) as folder:
        spawned, lines = run_measured(command, CASE_LIMIT_S, fresh_caches(Path(folder)))
    marks = read_marks(lines)
    found = read_result(lines) | {f"until_{mark}": moment - spawned for moment, mark in marks}
    # The mark follows the decode of a token after an image was encoded: first at the first bucket, and last at all
    # of them.
    decoded = [moment - spawned for moment, mark in marks if mark == "compile_decoder"]
    return found | {"until_first_step": decoded[0], "until_all_buckets": decoded[-1]}
