"""Figures on pages: each stands once, in a file of results, and every page has it as it is there."""

import json
from pathlib import Path

import pytest

from snapcap.benchmarks import figures
from snapcap.benchmarks.figures import RESULTS, ROOT, FiguresError, pages, with_figures

ABOUT = {"machine", "versions", "date", "commit", "command", "load_average", "figures"}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_figures_of_a_page_are_those_of_the_results(page: Path) -> None:
    assert page.read_text() == with_figures(page), "snapcap bench report writes them"


def test_the_pages_that_quote_measurements_are_held() -> None:
    found = {page.relative_to(ROOT).as_posix() for page in pages()}
    assert {"README.md", "docs/measurements.md", "deploy/kubernetes/README.md"} <= found


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: str(file.name))
def test_a_result_says_how_it_was_measured_and_is_quoted(file: Path) -> None:
    assert set(json.loads(file.read_text())) >= ABOUT
    quoted = (f"{file.name})", f" {file.stem} ", f" {file.stem}:")
    assert any(text in page.read_text() for page in pages() for text in quoted), "no page needs it"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of a repository with two files of results."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    about = {"machine": "a machine, 2 CPUs, Linux", "versions": "", "date": "", "commit": "c", "command": "run"}
    about |= {
        "load_average": "",
        "model": "demo",
        "clients": 16,
        "problems": {"litserve": "not installed: litserve"},
    }
    values = {"aot.ready": 0.25, "torch.total": 1.0, "many": 2318}
    servers = {"aot.ready": 0.251, "aot.lone_ms": 8.7, "aot.captions_per_s": 191.4}
    for name, found in (("start", values), ("servers", servers)):
        (results / f"{name}.json").write_text(json.dumps({**about, "figures": found}))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", results)
    figures.result.cache_clear()
    (tmp_path / "docs").mkdir()
    return tmp_path / "docs" / "page.md"


@pytest.mark.parametrize(
    ("quoted", "value"),
    [
        ("start aot.ready", "0.25"),
        ("start aot.ready / torch.total", "0.25"),
        ("start torch.total - aot.ready .1f", "0.8"),
        ("start many ,.0f", "2,318"),
    ],
)
def test_a_figure_is_written_before_its_comment(quoted: str, value: str, page: Path) -> None:
    page.write_text(f"In 2 runs, **9.9<!-- {quoted} -->** s, not 9.9 <!-- a comment -->.")
    assert with_figures(page) == f"In 2 runs, **{value}<!-- {quoted} -->** s, not 9.9 <!-- a comment -->."


@pytest.mark.parametrize("quoted", ["start eager.ready", "elsewhere aot.ready"])
def test_a_figure_that_no_result_has_is_an_error(quoted: str, page: Path) -> None:
    page.write_text(f"0<!-- {quoted} -->")
    with pytest.raises(FiguresError, match=r"page\.md"):
        with_figures(page)


def test_a_table_has_a_row_for_each_server_and_names_those_left_out(page: Path) -> None:
    page.write_text("a\n<!-- peers servers unmeasured: written by x -->\nold\n<!-- end of peers -->\nb\n")
    text = with_figures(page)
    assert "| **snapcap, aot** | **0.25 s** | **9 ms** | **191** |" in text
    assert "not installed: litserve" in text
    assert "[samples](../benchmarks/results/servers.json)" in text
    assert "old" not in text
    assert "| *the demo model: 2.95 M parameters, 96 × 96; a machine, 2 CPUs; 16 clients* |" in text
    page.write_text(text)
    assert with_figures(page) == text


def test_a_headline_has_a_row_for_each_run_that_was_made(page: Path) -> None:
    page.write_text("<!-- headline unmeasured: written by x -->\n<!-- end of headline -->\n")
    assert "|" not in with_figures(page)
    page.write_text("<!-- headline servers unmeasured: written by x -->\n<!-- end of headline -->\n")
    row = "| the demo model: 2.95 M parameters, 96 × 96; a machine, 2 CPUs; 16 clients | **0.25 s, 9 ms, 191/s** |"
    assert row in with_figures(page)
