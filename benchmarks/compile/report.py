"""Fills the tables of `snapcap bench modes`, with every case compared to eager."""

from collections.abc import Mapping, Sequence

from snapcap.benchmarks.compile.cases import CASES, EAGER
from snapcap.benchmarks.compile.steps import COMPONENTS
from snapcap.benchmarks.harness.measurements import Samples
from snapcap.benchmarks.report.tables import Report, number, ratio

_WHAT = {"encoder": "encode", "decoder": "step"}


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
    sizes = ", ".join(map(str, buckets))
    note = (
        f"medians of {runs} run(s); buckets {sizes}; first step: from spawn until the first images were encoded "
        "and one token was decoded; compile: the first calls of all buckets, less a later one; hits/misses: in "
        "torch's caches; memory: the most of the process until then, without compilers it starts; tokens: whether "
        "as eager"
    )
    _first(out, results, tokens, eager, note)
    _steady(out, results, buckets, eager, "", "Later steps")
    if any(case.median(f"encoder_{buckets[0]}_graph") is not None for case in results.values()):
        _steady(out, results, buckets, eager, "_graph", "Later steps, replayed as CUDA graphs")


def _first(
    out: Report, results: Mapping[str, Samples], tokens: Mapping[str, Sequence[int]], eager: Samples, note: str
) -> None:
    cuda = any(case.median("device_peak_mib") is not None for case in results.values())
    rows = []
    for name, samples in results.items():
        row = [
            CASES[name].title,
            number(samples.median("until_first_step"), 1),
            ratio(samples.median("until_first_step"), eager.median("until_first_step")),
            number(samples.median("until_all_buckets"), 1),
            ratio(samples.median("until_all_buckets"), eager.median("until_all_buckets")),
            *(number(_compile_seconds(samples, component), 1) for component in COMPONENTS),
            f"{samples.median('hits') or 0:.0f}/{samples.median('misses') or 0:.0f}",
            number(samples.median("peak_host_mib"), 0),
            ratio(samples.median("peak_host_mib"), eager.median("peak_host_mib")),
        ]
        if cuda:
            row.append(number(samples.median("device_peak_mib"), 0))
        same = tokens[name] == tokens[EAGER] if EAGER in tokens else None
        rows.append([*row, {None: "", True: "yes", False: "no"}[same]])
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
    out.add("What a start costs", columns, rows, note)


def _compile_seconds(samples: Samples, component: str) -> float | None:
    """Returns by how many seconds the first calls took longer than later ones."""
    first = samples.median(f"initial_{component}")
    steady = [
        samples.need(key)
        for key in samples.values
        if key.startswith(f"{component}_") and not key.endswith("_graph")
    ]
    return None if first is None else max(first - sum(steady) / 1000, 0.0)


def _steady(
    out: Report, results: Mapping[str, Samples], buckets: Sequence[int], eager: Samples, suffix: str, title: str
) -> None:
    cells = [(component, size) for component in COMPONENTS for size in buckets]
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
