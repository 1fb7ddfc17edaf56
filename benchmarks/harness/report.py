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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.table import Table

from snapcap.benchmarks.harness.processes import gpu_name
from snapcap.benchmarks.harness.workload import ROOT
from snapcap.warmup.machine.capacity import CPUINFO

VERSIONS = ("torch", "triton", "transformers", "litserve", "onnxruntime", "fastapi", "uvicorn")
PERCENTILES = (50, 90, 99)
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
            for name, value in measured.items():
                samples.values.setdefault(name, []).append(value)
        return samples

    def median(self, name: str) -> float:
        """Returns the median of a measurement, or NaN if the case has none."""
        return statistics.median(self.values.get(name) or [math.nan])


Column = str | Callable[[Samples], str]


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Returns p50, p90 and p99 of latencies by the nearest rank, in milliseconds."""
    found = np.percentile(seconds, PERCENTILES, method="inverted_cdf")
    return {f"p{share}_ms": float(value) * 1000 for share, value in zip(PERCENTILES, found, strict=True)}


@dataclass
class Report:
    """The tables in order, and the load of the machine when the report was begun."""

    tables: list[Group] = field(default_factory=list)
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    def add(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
        """Adds a table with a title above and a note below, unless it has no rows."""
        if rows:
            table = Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
            for row in rows:
                table.add_row(*row)
            self.tables.append(Group(table, note))

    def add_cases(
        self, title: str, cases: Mapping[str, Samples], columns: Mapping[str, Column], note: str = ""
    ) -> None:
        """Adds a table of medians, with a row for each case.

        A column is a measurement and its format, such as "ready .2f", or a function that returns a case's cell.
        """

        def cell(case: Samples, column: Column) -> str:
            if callable(column):
                return column(case)
            name, _, form = column.partition(" ")
            return "" if math.isnan(value := case.median(name)) else f"{value:{form}}"

        rows = [[name, *(cell(case, column) for column in columns.values())] for name, case in cases.items()]
        self.add(title, ["", *columns], rows, note)

    def end(
        self,
        options: argparse.Namespace,
        device: str,
        problems: Mapping[str, str],
        titles: Mapping[str, str],
        samples: Mapping[str, Samples],
        **further: Any,
    ) -> int:
        """Prints and writes a measurement of several cases, also those that were not measured, with the reasons.

        Returns the exit status, which is 1 if a case failed that could have been measured here.
        """
        rows = [[titles[name], why] for name, why in problems.items()]
        self.add("Not measured, or not to be trusted", ["", "because"], rows)
        about = {"benchmark": options.measure, "model": options.model, "device": device, "problems": problems}
        values = {name: case.values for name, case in samples.items()}
        # The median of each measurement, by the names of the case and the measurement.
        figures = {f"{case}.{name}": samples[case].median(name) for case, names in values.items() for name in names}
        self.write(options.json, figures, **about, samples=values, **further)
        return int(any(why.startswith("failed") for why in problems.values()))

    def write(self, file: Path | None, figures: Mapping[str, float], **further: Any) -> None:
        """Prints all tables.

        If a file is given, also writes the figures and ``further`` results to it. A figure is a number that a page
        may quote, by the name under which the page finds it.
        """
        about = {**setting(), "load_average": f"{self.load_before:.1f} before, {os.getloadavg()[0]:.1f} after"}
        console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
        console.print(*self.tables, sep="\n")
        load = f"load average {about['load_average']}"
        console.print(f"{about['machine']}; {about['versions']}; {load}; {about['date']}", highlight=False)
        console.print(f"$ {about['command']}", highlight=False, soft_wrap=True)
        if file is not None:
            # Six digits are more than any measurement is sure of.
            known = {name: float(f"{value:.6g}") for name, value in figures.items()}
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
    processor = re.search(r"^model name\s*: (.+)$", CPUINFO.read_text(), re.MULTILINE)
    cpu = processor[1] if processor else platform.processor() or platform.machine()
    parts = [cpu, f"{len(os.sched_getaffinity(0))} CPUs", f"{platform.system()} {platform.release()}"]
    gpu = gpu_name()
    versions = [f"Python {platform.python_version()}"]
    for package in VERSIONS:
        with contextlib.suppress(PackageNotFoundError):  # the package is not installed
            versions.append(f"{package} {version(package)}")
    return {
        "machine": ", ".join([gpu, *parts] if gpu else parts),
        "versions": ", ".join(versions),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        # Without the places of files, which are this machine's.
        "command": re.sub(r" --(?:cache|json)[= ]\S+", "", f"{command} {shlex.join(sys.argv[1:])}"),
    }


def commit() -> str:
    """Returns the commit that was measured, with a + if the tree differs from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() or "unknown"
    return "unknown"


def ratio(value: float, base: float) -> str:
    """Returns a cell with a ratio. The cell is empty if either value was not measured."""
    return "" if not base or math.isnan(value / base) else f"{value / base:.2f} ×"


def per_second(rate: float) -> str:
    return f"{rate:.{0 if rate >= 100 else 1}f}"
