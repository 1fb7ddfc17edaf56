"""Prints tables on the terminal, and writes all measurements as JSON, with their machine and versions."""

import contextlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from snapcap.benchmarks.harness.processes import gpu_name
from snapcap.benchmarks.harness.workload import ROOT

VERSIONS = ("torch", "triton", "transformers", "onnxruntime", "fastapi", "uvicorn")
_NUMBER = re.compile(r"[≤≥<>+-]? ?\d")
# Width of output to a file, which fits the widest table.
FILE_WIDTH = 150


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

    def add_problems(self, problems: Mapping[str, str]) -> int:
        """Adds the cases that were not measured, with the reasons.

        Returns the exit status, which is 1 if a case failed that could have been measured here.
        """
        self.add("Not measured, or not to be trusted", ["", "because"], [list(each) for each in problems.items()])
        return int(any(why.startswith("failed") for why in problems.values()))

    def write(self, file: Path | None, raw: Mapping[str, Any]) -> None:
        """Prints all tables. Also writes them with the raw samples if a file is given."""
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
            file.write_text(json.dumps({**about, "tables": self.tables, **raw}, indent=1) + "\n")


def setting() -> dict[str, str]:
    """Returns where and how the measurement was made."""
    module = sys.modules["__main__"].__spec__
    name = (module.name if module is not None else Path(sys.argv[0]).stem).removesuffix(".__main__")
    command = ["snapcap"] if name == "snapcap" else ["python", "-m", name]
    parts = [cpu_model(), f"{len(os.sched_getaffinity(0))} CPUs", f"{platform.system()} {platform.release()}"]
    gpu = gpu_name()
    return {
        "machine": ", ".join([gpu, *parts] if gpu else parts),
        "versions": ", ".join([f"Python {platform.python_version()}", *_versions()]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "command": shlex.join([*command, *sys.argv[1:]]),
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
