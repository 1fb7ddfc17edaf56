"""Measures the ways and modes of torch.compile: the cost of the first steps, and the time of later ones.

Each case is a fresh process with empty caches (`benchmarks/harness/compiled_case.py`). Seconds count from its
spawn. A case that restores reads what the cold case before it saved: torch's cache artifacts, and "as jit" the
libraries that the jit backend adds to them. Cases that are not "as jit" compile the plain regions, even if the
server has kernels of its own for them.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from snapcap.benchmarks.contenders import Turns, UnavailableError
from snapcap.benchmarks.harness.arguments import count, counts
from snapcap.benchmarks.harness.compiled_case import How, Job, Mode
from snapcap.benchmarks.harness.report import Column, Report, Samples, ratio
from snapcap.benchmarks.harness.server import run_measured
from snapcap.benchmarks.harness.workload import FIRST_IMAGE, fresh_caches, open_workload, scratch
from snapcap.models.json_object import to_json

EAGER = "eager"
_TUNED: Mode = "max-autotune"
_REDUCED: Mode = "reduce-overhead"
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


TITLES = {name: case.title for name, case in CASES.items()}
DEFAULT = tuple(CASES)


def with_needed(names: Iterable[str]) -> list[str]:
    """Returns these cases, eager for comparison, and the cases that they restore, in order."""
    wanted = {EAGER, *names}
    wanted |= {CASES[name].restores for name in wanted}
    return [name for name in CASES if name in wanted]


def fill(
    out: Report, results: Mapping[str, Samples], tokens: Mapping[str, Sequence[int]], buckets: Sequence[int]
) -> None:
    """Adds the tables of the cases in ``results``. Without eager there are no ratios, and tokens are not
    compared."""
    eager = results.get(EAGER, Samples())
    cases = {CASES[name].title: samples for name, samples in results.items()}

    def beside(measurement: str) -> Callable[[Samples], str]:
        return lambda case: ratio(case.median(measurement), eager.median(measurement))

    start: dict[str, Column] = {
        "first step s": "until_first_step .1f",
        "first /eager": beside("until_first_step"),
        "all buckets s": "until_all_buckets .1f",
        "all /eager": beside("until_all_buckets"),
        "peak MiB": "peak_host_mib .0f",
        "GPU MiB": "device_peak_mib .0f",
    }
    note = (
        "Medians, seconds from exec. first step: the first images are encoded and one token is decoded. Memory: "
        "the most of the process until all buckets have run, without compilers that it starts."
    )
    out.add_cases("What a start costs", cases, start, note)
    for suffix, title in (("", "Later steps"), ("_graph", "Later steps, replayed as CUDA graphs")):
        columns: dict[str, Column] = {}
        for what, component in (("encode", "encoder"), ("step", "decoder")):
            for size in buckets:
                columns[f"{what} × {size}"] = f"{component}_{size}{suffix} .3f"
                columns[f"{what} × {size} /eager"] = beside(f"{component}_{size}{suffix}")
        measured = {name: each for name, each in cases.items() if f"encoder_{buckets[0]}{suffix}" in each.values}
        out.add_cases(title, measured, columns, "Medians, ms, of means of 20 in a row.")
    wrong = [[CASES[name].title] for name, found in tokens.items() if found != tokens.get(EAGER, found)]
    out.add("Tokens", ["other than eager's"], wrong)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "number of fresh processes of each case (default: %(default)s)"
    parser.add_argument("--runs", type=count, default=1, metavar="N", help=text)
    text = "batch sizes that are compiled (default: %(default)s)"
    parser.add_argument("--buckets", type=counts, default="1,4", metavar="N,…", help=text)


def run(options: argparse.Namespace, device: str) -> int:
    """Runs the measurement. The exit status is 0 if every case that can run here gave results."""
    report = Report()
    with scratch(options.cache) as cache, scratch() as work:
        workload = open_workload(options.model, cache)
        job = Job(workload.folder, workload.images / FIRST_IMAGE, device, tuple(options.buckets), CASES[EAGER].how)
        turns = Turns(end=time.monotonic() + options.time_limit)
        found = measure_all(turns, with_needed(options.cases), options.runs, job, work)
    samples = {
        name: Samples.of(
            {key: value for key, value in each.items() if isinstance(value, int | float)} for each in runs
        )
        for name, runs in found.items()
    }
    tokens = {name: runs[-1]["tokens"] for name, runs in found.items()}
    fill(report, samples, tokens, options.buckets)
    return report.end(options, device, turns.problems, TITLES, samples, tokens=tokens)


def measure_all(
    turns: Turns, names: Sequence[str], runs: int, job: Job, kept: Path
) -> dict[str, list[dict[str, Any]]]:
    """Runs every case once, and then all again. Returns what each case found in each run."""

    def run(name: str) -> dict[str, Any]:
        case = CASES[name]
        if case.cuda and job.device != "cuda":
            raise UnavailableError("needs a CUDA device")
        if case.restores in turns.problems:
            raise UnavailableError(f"there is nothing to restore of {CASES[case.restores].title}")
        return measure(name, job, kept)

    return turns.rounds(names, runs, run)


def measure(name: str, job: Job, kept: Path) -> dict[str, Any]:
    """Runs a case of ``job`` in a process of its own. Returns its numbers, and the seconds until each of its marks.

    Raises:
        RuntimeError: the case failed, or took too long.
    """
    case = CASES[name]
    save = kept / name if any(other.restores == name for other in CASES.values()) else None
    job = replace(job, how=case.how, save=save, restore=kept / case.restores if case.restores else None)
    command = (sys.executable, "-m", "snapcap.benchmarks.harness.compiled_case", to_json(job))
    with scratch() as folder:
        marks, found = run_measured(command, CASE_LIMIT_S, fresh_caches(folder))
    # The mark follows the decode of a token after an image was encoded: first at the first bucket, and last at all
    # of them.
    decoded = [moment for mark, moment in marks if mark == "compile_decoder"]
    found |= {f"until_{mark}": moment for mark, moment in marks}
    return found | {"until_first_step": decoded[0], "until_all_buckets": decoded[-1]}
