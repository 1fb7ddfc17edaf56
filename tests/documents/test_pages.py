"""What the pages say: how long the README is, which blocks are run, and that what they name is there."""

import importlib.util
import re
from pathlib import Path

import pytest
from support.documents.pages import ROOT, RUN, blocks, pages

from snapcap.service.cli.main import main
from snapcap.service.config.settings import GROUPS
from snapcap.warmup.option import options_of

NOT_RUN = re.compile(
    r"not run: (?:needs (?:a network|a cluster|a GPU|a machine with nothing else on it|Docker|Grafana)"
    r"|runs until it is stopped|writes into the repository)\b.*"
)
TESTS = re.compile(r"\b(tests/[\w/]+(?:\.py)?)")
COMMAND = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(?:snapcap|make|pip|curl|docker|kubectl|serve|prometheus|promtool|python3? -m) ",
    re.MULTILINE,
)


def variables() -> set[str]:
    return {option.variable for group in GROUPS.values() for option in options_of(group).values()}


def test_the_readme_is_short_and_begins_with_a_sentence() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 120
    assert lines[0] == "# snapcap"
    assert lines[2].startswith("snapcap is ")
    assert {"make serve", "make test"} <= set(re.findall(r"make \w+", "\n".join(lines)))


def test_every_page_is_in_the_site() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    found |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*.md")}
    found |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "deploy").rglob("*.md")}
    assert found <= set(pages())


@pytest.mark.parametrize("page", pages())
def test_every_block_of_commands_is_run_or_says_why_not(page: str) -> None:
    for block in blocks(page):
        if block.language in RUN:
            assert not block.mark or NOT_RUN.fullmatch(block.mark), f"{block}: {block.mark}"
            for path in TESTS.findall(block.mark):
                assert (ROOT / path).exists(), f"{block}: there is no {path}"
        else:
            assert block.language in ("", "text", "json", "toml"), block
            assert not block.mark, f"{block}: only commands are run"
            assert not COMMAND.search(block.text), f"{block}: commands begin with ```bash"


@pytest.mark.parametrize("page", pages())
def test_no_command_stands_outside_of_a_fence(page: str) -> None:
    """A block that is indented would be neither run nor marked."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^ {4,}(?:snapcap|make|pip|curl|docker|python) .*$", text, re.MULTILINE) == []


@pytest.mark.parametrize("page", [page for page in pages() if page != "CHANGELOG.md"])
def test_what_a_page_names_is_there(page: str) -> None:
    """Modules that are run, and variables. Of what the changelog names, some is gone."""
    text = (ROOT / page).read_text()
    for module in re.findall(r"python -m (snapcap[\w.]*)", text):
        assert importlib.util.find_spec(module), module
    assert {name for name in re.findall(r"\bSNAPCAP_\w+", text) if not name.endswith("_")} <= variables()


@pytest.mark.parametrize("page", [page for page in pages() if page.startswith(("README", "docs/", "deploy/"))])
def test_the_options_that_a_page_names_are_there(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"--help", "--no-prepared-weights", "--gpus"}  # the last one is Docker's
    for command in ("serve", "build", "explain", "caption", "import"):
        with pytest.raises(SystemExit):
            main([command, "--help-all" if command in ("serve", "caption") else "--help"])
        known |= set(re.findall(r"--[a-z0-9-]*[a-z0-9]", capsys.readouterr().out))
    spans = re.findall(r"`((?:--|snapcap (?!bench))[^`\n]+)`", (ROOT / page).read_text())
    named = {flag for span in spans for flag in re.findall(r"--[a-z0-9_-]*[a-z0-9]", span)}
    assert named <= known


def test_the_site_is_in_nothing_that_is_shipped() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    (folder,) = re.findall(r"^site_dir: (\w+)/\w+$", config, re.MULTILINE)
    assert f"/{folder}/" in (ROOT / ".gitignore").read_text().splitlines()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert not {f"!{folder}", "!docs", "!mkdocs.yml"} & set(ignored)


def test_a_mark_and_a_language_are_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n<!-- not run: needs a GPU -->\n```bash\nmake\n```\n\n```\nx\n```\n")
    first, second = blocks(str(page))
    assert (first.line, first.language, first.mark, first.text) == (4, "bash", "not run: needs a GPU", "make\n")
    assert (second.line, second.language, second.mark, second.text) == (8, "", "", "x\n")
    assert not first.is_run
