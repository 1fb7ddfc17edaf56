"""Writes the figures of `benchmarks/results` into the pages that quote them.

A figure on a page is followed by a comment, invisible to readers, that names its source:

    ready after 0.27<!-- cpu-startup aot.ready --> s, 0.27<!-- cpu-startup aot.ready / import-torch.total --> of …

The first word is a file of `benchmarks/results`, without `.json`. The next names one of the file's figures, or two
with `/` or `-` between them. A last word such as `.1f` is a Python format; the default is `.2f`. A table stands
between two comments, `NAME FILE…: written by …` and `end of NAME`, where NAME is one of `TABLES`.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from snapcap.benchmarks.contenders import TITLES
from snapcap.benchmarks.harness.report import per_second
from snapcap.benchmarks.harness.workload import ROOT
from snapcap.benchmarks.modes import CASES

RESULTS = ROOT / "benchmarks" / "results"
_FIGURE = re.compile(
    r"[+-]?[\d.,]*\d(?P<comment><!-- (?P<file>[a-z][\w-]*) (?P<one>[\w.-]+)"
    r"(?: (?P<sign>[/-]) (?P<two>[\w.-]+))?(?: (?P<format>,?\.\df))? -->)"
)
_TABLE = re.compile(
    r"(?P<begin><!-- (?P<name>[a-z]+)(?P<files>(?: [\w-]+)+): written by [^\n]* -->\n).*?"
    r"(?P<end><!-- end of (?P=name) -->)",
    re.DOTALL,
)
# The servers of a headline, in this order.
_SHOWN = ("aot", "transformers-eager", "transformers-batched", "litserve", "onnxruntime")
_HEADLINE = (
    "Each cell has the time until the server is ready, the time of a lone caption, and captions/s of all clients. "
    "*aot* is snapcap with packages. The captioners have random weights in the shapes of the real ones, and their "
    "captions have 20 tokens:"
)
_MODELS = {
    "demo": "the demo model: 2.95 M parameters, 96 × 96",
    "blip-base": "BLIP base: 224 M parameters, 384 × 384",
    "smolvlm-256m": "SmolVLM: 256 M parameters, 512 × 512",
}


class FiguresError(ValueError):
    """A page quotes a figure that no result has. The message names the page and the figure."""


@cache
def result(name: str) -> dict[str, Any]:
    """Returns a file of results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def with_figures(page: Path) -> str:
    """Returns the text of a page with its figures and tables updated from the results. A table leaves out missing
    runs, and is empty without any run.

    Raises:
        FiguresError: the page quotes a figure that no result has, or names a table that does not exist.
    """

    def quoted(match: re.Match[str]) -> str:
        figures = result(match["file"])["figures"]
        value = figures[match["one"]]
        if match["two"]:
            other = figures[match["two"]]
            value = value / other if match["sign"] == "/" else value - other
        return f"{value:{match['format'] or '.2f'}}{match['comment']}"

    def tabled(match: re.Match[str]) -> str:
        made = [name for name in match["files"].split() if (RESULTS / f"{name}.json").exists()]
        table = f"\n{TABLES[match['name']](made, folder)}\n\n" if made else ""
        return match["begin"] + table + match["end"]

    folder = "../" * (len(page.resolve().relative_to(ROOT).parts) - 1) + "benchmarks/results"
    try:
        return _TABLE.sub(tabled, _FIGURE.sub(quoted, page.read_text()))
    except (KeyError, OSError) as error:
        raise FiguresError(f"{page.name}: the results lack {error}") from error


def peers(files: Sequence[str], folder: str) -> str:
    """Returns a table with a row for each server of each run of `snapcap bench peers`, and the runs below it.

    ``folder`` is the path from the page to the results.
    """
    rows = []
    for found in map(result, files):
        figures: Mapping[str, float] = found["figures"]
        rows.append([f"*{_run(found)}*", "", "", ""])
        for case in (case for case in TITLES if f"{case}.ready" in figures):
            cells = [TITLES[case], *_three(figures, case)]
            rows.append([f"**{cell}**" for cell in cells] if case == "aot" else cells)
    lines = [_rows(["", "ready after", "a lone caption", "captions/s"], rows), ""]
    return "\n".join([*lines, *(_source(name, folder) for name in files)])


def headline(files: Sequence[str], folder: str) -> str:
    """Returns a table with a row for each run of `snapcap bench peers`, and the main servers side by side."""
    runs = [result(name) for name in files]
    cases = [name for name in _SHOWN if any(f"{name}.ready" in run["figures"] for run in runs)]
    rows = []
    for run in runs:
        cells = [", ".join(_three(run["figures"], case)) for case in cases]
        rows.append([_run(run), f"**{cells[0]}/s**", *(cell and f"{cell}/s" for cell in cells[1:])])
    return f"{_HEADLINE}\n\n{_rows(['', *(TITLES[name] for name in cases)], rows)}"


def _three(figures: Mapping[str, float], case: str) -> list[str]:
    """Returns a server's time to ready, its lone caption and its captions/s, or [] if it was not measured."""
    if f"{case}.ready" not in figures:
        return []
    ready, lone, rate = (figures[f"{case}.{name}"] for name in ("ready", "lone_ms", "captions_per_s"))
    return [f"{ready:.2f} s", f"{lone:,.0f} ms", per_second(rate)]


def _run(found: Mapping[str, Any]) -> str:
    """Returns the model, the machine and the number of clients of a run of `snapcap bench peers`."""
    return f"{_MODELS.get(found['model'], found['model'])}; {_machine(found)}; {found['clients']} clients"


def _machine(found: Mapping[str, Any]) -> str:
    """Returns the GPU or the CPU of a run, and the number of CPUs."""
    parts = found["machine"].split(", ")
    return f"{parts[0]}, {next(part for part in parts if part.endswith(' CPUs'))}"


def modes(files: Sequence[str], folder: str) -> str:
    """Returns a table with a row for each way to compile of each run of `snapcap bench modes`, and the runs."""
    rows = []
    for found in map(result, files):
        figures: Mapping[str, float] = found["figures"]
        rows.append([f"*{found['model']}; {_machine(found)}*", *[""] * 6])
        for name, case in CASES.items():
            if f"{name}.until_first_step" not in figures:
                continue
            graph = "_graph" if f"{name}.encoder_1_graph" in figures else ""
            names = ("until_first_step", "peak_host_mib", f"encoder_1{graph}", f"decoder_1{graph}")
            first, memory, encode, step = (figures[f"{name}.{each}"] for each in names)
            same = "yes" if found["tokens"][name] == found["tokens"]["eager"] else "no"
            times = [f"{first:.1f}", f"{first / figures['eager.until_first_step']:.2f} ×", f"{memory:,.0f}"]
            rows.append([case.title, *times, f"{encode:.2f}", f"{step:.2f}", same])
    columns = ["", "exec → first step, s", "÷ eager", "peak, MiB", "an encode, ms", "a step, ms", "eager's tokens"]
    return "\n".join([_rows(columns, rows), "", *(_source(name, folder) for name in files)])


TABLES: dict[str, Callable[[Sequence[str], str], str]] = {"headline": headline, "peers": peers, "modes": modes}


def _rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (columns, *rows)]
    lines.insert(1, "|---" * len(columns) + "|")
    return "\n".join(lines).replace("  ", " ")


def _source(name: str, folder: str) -> str:
    """Returns a line of a list that says how a file of results was measured."""
    found = result(name)
    left_out = "".join(f"; {TITLES.get(case, case)}: {why}" for case, why in found.get("problems", {}).items())
    about = f"{found['versions']}; load average {found['load_average']}"
    where = f"`{found['command']}` at {found['commit']}, {found['date']}"
    return f"- {where}; {about}{left_out} ([samples]({folder}/{name}.json))"


def pages() -> list[Path]:
    """Returns every page of the repository that quotes a figure."""
    folders = (ROOT, *(ROOT / name for name in ("docs", "benchmarks", "deploy")), *(ROOT / "deploy").rglob("*/"))
    found = (page for folder in folders for page in sorted(folder.glob("*.md")))
    return [page for page in found if _FIGURE.search(text := page.read_text()) or _TABLE.search(text)]


def write() -> None:
    """Writes the figures into every page that quotes one.

    Raises:
        FiguresError: a page quotes a figure that no result has.
    """
    for page in pages():
        page.write_text(with_figures(page))
