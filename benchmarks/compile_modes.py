"""The ways to compile a captioner with `torch.compile`, and the modes: what each costs at first and takes later.

    python -m benchmarks.compile_modes [--cases CASE,…] [--runs N] [--buckets 1,4] [--device cpu] [--json FILE]

Each case is a fresh process with empty caches (`benchmarks/compile_case.py`); seconds count from its spawn. What is
restored is what the cold case before it has saved: torch's cache artifacts, and "as jit" the libraries that the jit
backend adds to them. A case that cannot run is named with its reason, and the others go on.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import count, counts, some_of
from benchmarks.common import DEMO, SAMPLES, fresh_caches
from benchmarks.marks import read_marks, read_result
from benchmarks.measurements import Samples
from benchmarks.report import Report, number, ratio
from benchmarks.server import Process

COMPONENTS = ("encoder", "decoder")
CASE_LIMIT_S = 1800.0
EAGER = "eager"


@dataclass(frozen=True)
class Case:
    """The options of `benchmarks.compile_case`; ``restores``: the case whose files it reads."""

    title: str
    options: tuple[str, ...]
    restores: str = ""
    cuda: bool = False  # only there


CASES = {
    EAGER: Case("eager", ("eager",)),
    "full": Case("full model", ("full",)),
    "full-restored": Case("full model, restored", ("full",), restores="full"),
    "hierarchical": Case("full model, nested regions", ("hierarchical",)),
    "regional": Case("regional", ("regional",)),
    "regional-restored": Case("regional, restored", ("regional",), restores="regional"),
    "jit": Case("regional as jit", ("regional", "--as-jit")),
    "jit-restored": Case("regional as jit, restored", ("regional", "--as-jit"), restores="jit"),
    "encoder": Case("regional, encoder alone", ("regional", "--only", "encoder")),
    "decoder": Case("regional, decoder alone", ("regional", "--only", "decoder")),
    "tuned-encoder": Case("regional, encoder max-autotune", ("regional", "--encoder-mode", "max-autotune")),
    "tuned-decoder": Case("regional, decoder max-autotune", ("regional", "--decoder-mode", "max-autotune")),
    "tuned": Case(
        "regional, both max-autotune",
        ("regional", "--encoder-mode", "max-autotune", "--decoder-mode", "max-autotune"),
    ),
    "reduce-overhead": Case(
        "full model, reduce-overhead",
        ("full", "--encoder-mode", "reduce-overhead", "--decoder-mode", "reduce-overhead"),
        cuda=True,
    ),
}


@dataclass(frozen=True)
class Setup:
    """What all cases have in common."""

    model: str
    image: Path
    device: str
    dtype: str
    threads: int
    buckets: Sequence[int]

    @property
    def options(self) -> tuple[str, ...]:
        buckets = ",".join(map(str, self.buckets))
        given = {"model": self.model, "image": self.image, "device": self.device, "dtype": self.dtype}
        flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        return (*flags, "--threads", str(self.threads), "--buckets", buckets)


def measure(name: str, setup: Setup, kept: Path) -> dict[str, Any]:
    """One case in one process: its numbers, and seconds until each of its marks.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    case = CASES[name]
    files = ("--restore", str(kept / case.restores)) if case.restores else ()
    if any(other.restores == name for other in CASES.values()):
        files = ("--save", str(kept / name))
    command = (sys.executable, "-m", "benchmarks.compile_case", *case.options, *setup.options, *files)
    with tempfile.TemporaryDirectory(prefix="snapcap-bench-", ignore_cleanup_errors=True) as folder:
        process = Process(command, fresh_caches(Path(folder)))
        try:
            process.wait(CASE_LIMIT_S)
            lines = process.log().splitlines()
        finally:
            process.stop()
    found = read_result(lines)
    found |= {f"until_{mark}": moment - process.spawned for moment, mark in read_marks(lines)}
    return found


def measure_all(names: Sequence[str], runs: int, setup: Setup) -> tuple[dict[str, Samples], dict[str, Any]]:
    """Every case once, then every case again. Returns the numbers, and what is none: tokens and failures."""
    results, facts = {name: Samples() for name in names}, dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="snapcap-bench-") as kept:
        for run in range(runs):
            for name in names:
                print(f"run {run + 1} of {runs}: {CASES[name].title}", file=sys.stderr, flush=True)
                try:
                    found = measure(name, setup, Path(kept))
                except RuntimeError as error:
                    facts[name] = {"failed": str(error)}
                    continue
                results[name].add({key: value for key, value in found.items() if isinstance(value, int | float)})
                facts[name] = {"tokens": found["tokens"]}
    return results, facts


def rows_of(results: Mapping[str, Samples]) -> list[tuple[str, Samples]]:
    """The cases that ran, with their titles."""
    return [(CASES[name].title, samples) for name, samples in results.items() if samples.values]


def report(results: Mapping[str, Samples], facts: Mapping[str, Any], setup: Setup, runs: int) -> Report:
    out = Report()
    eager = results[EAGER]
    _first(out, results, facts, eager)
    _steady(out, results, setup, eager, "", "Later steps")
    if eager.median(f"encoder_{setup.buckets[0]}_graph") is not None:
        _steady(out, results, setup, eager, "_graph", "Later steps, replayed as CUDA graphs")
    failed = [[CASES[name].title, fact["failed"]] for name, fact in facts.items() if "failed" in fact]
    if failed:
        out.add("Could not run", ["case", "reason"], failed)
    buckets = ", ".join(map(str, setup.buckets))
    out.tables[0]["note"] = (
        f"medians of {runs} run(s); buckets {buckets}; first step: from spawn until the first images were encoded "
        "and one token was decoded; compile: the first calls of all buckets, less a later one; hits/misses: in "
        "torch's caches; memory: the most of the process, without compilers it starts; tokens: whether as eager"
    )
    return out


def _first(out: Report, results: Mapping[str, Samples], facts: Mapping[str, Any], eager: Samples) -> None:
    cuda = eager.median("device_peak_mib") is not None
    rows = []
    for name, samples in results.items():
        if not samples.values:
            continue
        compile_s = [_compile_seconds(samples, component) for component in COMPONENTS]
        row = [
            CASES[name].title,
            number(samples.median("until_first_step"), 1),
            ratio(samples.median("until_first_step"), eager.median("until_first_step")),
            number(samples.median("until_all_buckets"), 1),
            ratio(samples.median("until_all_buckets"), eager.median("until_all_buckets")),
            *(number(value, 1) for value in compile_s),
            f"{samples.median('hits') or 0:.0f}/{samples.median('misses') or 0:.0f}",
            number(samples.median("peak_host_mib"), 0),
            ratio(samples.median("peak_host_mib"), eager.median("peak_host_mib")),
        ]
        if cuda:
            row.append(number(samples.median("device_peak_mib"), 0))
        rows.append([*row, "yes" if facts[name]["tokens"] == facts[EAGER]["tokens"] else "no"])
    columns = [
        "exec → …, s",
        "first step",
        "/eager",
        "all buckets",
        "/eager",
        "compile encoder s",
        "decoder s",
        "hits/misses",
        "peak MiB",
        "/eager",
        *(["GPU MiB"] if cuda else []),
        "tokens",
    ]
    out.add("What a start costs", columns, rows)


def _compile_seconds(samples: Samples, component: str) -> float | None:
    """What the first calls took longer than later ones."""
    first = samples.median(f"initial_{component}")
    steady = [
        samples.need(key)
        for key in samples.values
        if key.startswith(f"{component}_") and not key.endswith("_graph")
    ]
    return None if first is None else max(first - sum(steady) / 1000, 0.0)


def _steady(
    out: Report, results: Mapping[str, Samples], setup: Setup, eager: Samples, suffix: str, title: str
) -> None:
    columns, rows = ["", *_step_columns(setup)], []
    for name, samples in rows_of(results):
        row = [name]
        for component in COMPONENTS:
            for size in setup.buckets:
                key = f"{component}_{size}{suffix}"
                row += [number(samples.median(key), 3), ratio(eager.median(key), samples.median(key))]
        if any(row[1:]):
            rows.append(row)
    out.add(title, columns, rows, "ms; faster: than eager of the same kind")


def _step_columns(setup: Setup) -> list[str]:
    what = {"encoder": "encode", "decoder": "step"}
    return [
        column
        for component in COMPONENTS
        for size in setup.buckets
        for column in (f"{what[component]} × {size}", "faster")
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=some_of(CASES), default="all", help=f"of {', '.join(CASES)}")
    parser.add_argument("--runs", type=count, default=1)
    parser.add_argument("--model", default=str(DEMO), help="checkpoint folder")
    parser.add_argument("--image", type=Path, default=SAMPLES / "pair-1.png")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0: as the server")
    parser.add_argument("--buckets", type=counts, default="1,4", help="batch sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write tables and samples")
    options = parser.parse_args()
    setup = Setup(
        options.model, options.image, options.device, options.dtype, options.threads, tuple(options.buckets)
    )
    names = [name for name in options.cases if not CASES[name].cuda or setup.device.startswith("cuda")]
    needed = {EAGER, *names, *(CASES[name].restores for name in names)}
    names = [name for name in CASES if name in needed]
    results, facts = measure_all(names, options.runs, setup)
    if not results[EAGER].values:
        print(f"eager failed: {facts[EAGER]['failed']}", file=sys.stderr)
        return 1
    raw = {"samples": {name: samples.values for name, samples in results.items()}, "facts": facts}
    report(results, facts, setup, options.runs).write(options.json, raw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
