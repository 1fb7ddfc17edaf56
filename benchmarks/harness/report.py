"""Holds samples, prints tables, and writes figures and samples as JSON, with their machine and versions."""

import argparse
import contextlib
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from snapcap.benchmarks.harness.processes import gpu_name
from snapcap.benchmarks.harness.workload import ROOT

VERSIONS = ("torch", "triton", "transformers", "litserve", "onnxruntime", "fastapi", "uvicorn")
_NUMBER = re.compile(r"[≤≥<>+-]? ?\d")
# Width of output to a file, which fits the widest table.
FILE_WIDTH = 150


@dataclass
class Samples:
    """The values of a case, by the name of the measurement."""

    values: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, rounds: Iterable[Mapping[str, float]]) -> "Samples":
        """Returns the values of several rounds."""
        samples = cls()
        for measured in rounds:
            samples.add(measured)
        return samples

    def add(self, measured: Mapping[str, float]) -> None:
        for name, value in measured.items():
            self.values.setdefault(name, []).append(value)

    def median(self, name: str) -> float | None:
        values = self.values.get(name)
        return statistics.median(values) if values else None

    def need(self, name: str) -> float:
        """Returns the median of a measurement that must exist."""
        return statistics.median(self.values[name])


def figures_of(cases: Mapping[str, Samples]) -> dict[str, float]:
    """Returns the median of each measurement of each case, named ``case.measurement``."""
    return {f"{case}.{name}": samples.need(name) for case, samples in cases.items() for name in samples.values}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the nearest-rank percentile of values in ascending order. ``share`` is from 0 to 1.

    Raises:
        ValueError: there are no values.
    """
    if not ordered:
        raise ValueError("a percentile of no values")
    rank = math.ceil(round(share * len(ordered), 9))  # without rounding, 0.07 * 100 is 7.000000000000001
    return ordered[min(max(rank, 1), len(ordered)) - 1]


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Returns p50, p90 and p99 of latencies, in milliseconds."""
    ordered = sorted(seconds)
    return {f"p{round(share * 100)}_ms": percentile(ordered, share) * 1000 for share in (0.50, 0.90, 0.99)}


@dataclass
class Report:
    """The tables in order, and the load of the machine when the report was begun."""

    tables: list[dict[str, Any]] = field(default_factory=list)
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    def add(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
        """Adds a table with a title above and a note below, unless it has no rows."""
        if not rows:
            return
        self.tables.append(
            {"title": title, "columns": list(columns), "rows": [list(row) for row in rows], "note": note}
        )

    def add_problems(self, problems: Mapping[str, str], titles: Mapping[str, str]) -> int:
        """Adds the cases that were not measured, with the reasons.

        Returns the exit status, which is 1 if a case failed that could have been measured here.
        """
        rows = [[titles[name], why] for name, why in problems.items()]
        self.add("Not measured, or not to be trusted", ["", "because"], rows)
        return int(any(why.startswith("failed") for why in problems.values()))

    def end(
        self,
        options: argparse.Namespace,
        device: str,
        problems: Mapping[str, str],
        titles: Mapping[str, str],
        samples: Mapping[str, Samples],
        **further: Any,
    ) -> int:
        """Prints and writes a measurement of several cases. Returns the exit status, as `add_problems` does."""
        status = self.add_problems(problems, titles)
        about = {"benchmark": options.measure, "model": options.model, "device": device, "problems": problems}
        values = {name: case.values for name, case in samples.items()}
        self.write(options.json, figures_of(samples), **about, samples=values, **further)
        return status

    def write(self, file: Path | None, figures: Mapping[str, float | None], **further: Any) -> None:
        """Prints all tables.

        If a file is given, also writes the figures and ``further`` results to it. A figure is a number that a page
        may quote, by the name under which the page finds it.
        """
        about = {**setting(), "load_average": f"{self.load_before:.1f} before, {os.getloadavg()[0]:.1f} after"}
        console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
        for table in self.tables:
            shown = Table(title=table["title"], title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
            for index, column in enumerate(table["columns"]):
                numbers = all(_NUMBER.match(row[index]) for row in table["rows"] if row[index])
                shown.add_column(column, justify="right" if index and numbers else "left", no_wrap=index == 0)
            for row in table["rows"]:
                shown.add_row(*row)
            console.print(shown)
            if table["note"]:
                console.print(table["note"], highlight=False, style="dim")
                console.print()
        load = f"load average {about['load_average']}"
        console.print(f"{about['machine']}; {about['versions']}; {load}; {about['date']}", highlight=False)
        console.print(f"$ {about['command']}", highlight=False, soft_wrap=True)
        if file is not None:
            known = {name: rounded(value) for name, value in figures.items() if value is not None}
            text = json.dumps({**about, **further, "figures": known}, indent=1)
            # A list of numbers takes one line.
            lines = re.sub(r"\[[^][{}\"]*\]", lambda each: " ".join(each[0].split()), text)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(lines + "\n")


def setting() -> dict[str, str]:
    """Returns where and how the measurement was made."""
    module = sys.modules["__main__"].__spec__
    name = (module.name if module is not None else Path(sys.argv[0]).stem).removesuffix(".__main__")
    command = "snapcap" if name == "snapcap" else f"python -m {name}"
    parts = [cpu_model(), f"{len(os.sched_getaffinity(0))} CPUs", f"{platform.system()} {platform.release()}"]
    gpu = gpu_name()
    return {
        "machine": ", ".join([gpu, *parts] if gpu else parts),
        "versions": ", ".join([f"Python {platform.python_version()}", *_versions()]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        # Without the places of files, which are this machine's.
        "command": re.sub(r" --(?:cache|json)[= ]\S+", "", f"{command} {shlex.join(sys.argv[1:])}"),
    }


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """Returns the commit that was measured, with a + if the tree differs from it."""
    state = [_git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")]
    return (state[0] + ("+" if state[1] else "")) or "unknown"


def rounded(value: float) -> float:
    """Returns a number with six digits, which is more than any measurement is sure of."""
    return float(f"{value:.6g}")


def ratio(value: float | None, base: float | None) -> str:
    return "" if value is None or not base else f"{value / base:.2f} ×"


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def per_second(rate: float) -> str:
    return number(rate, 0 if rate >= 100 else 1)


def _git(*arguments: str) -> str:
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def _versions() -> list[str]:
    """Returns the versions of the packages that matter and are installed."""
    found = []
    for name in VERSIONS:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return found
