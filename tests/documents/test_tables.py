"""Holds that the tables of the documents are what the code declares."""

import re
from pathlib import Path

import pytest
from support.documents.tables import TABLES, caption_options, main, server_options, with_tables

from snapcap.service.captioning.options import OPTIONS
from snapcap.service.config.settings import GROUPS
from snapcap.warmup.option import options_of

ROOT = Path(__file__).parents[2]
PAGES = {"settings": "docs/configuration.md", "options": "docs/api.md", "refusals": "docs/security.md"}
BEGIN, END = "<!-- options: written by `it` -->", "<!-- end of options -->"


def test_the_table_has_a_row_for_every_server_option() -> None:
    rows = [line for line in server_options().splitlines() if line.startswith("| `")]
    options = [option for group in GROUPS.values() for option in options_of(group).values()]
    assert len(rows) == len(options)
    for row, option in zip(rows, options, strict=True):
        assert row.startswith(f"| `{option.flag}")
        assert row.count(" | ") == 3
        assert option.variable in row


def test_the_table_has_a_row_for_every_option_of_a_caption() -> None:
    rows = {line.split("`")[1]: line for line in caption_options().splitlines() if line.startswith("| `")}
    assert list(rows) == list(OPTIONS)
    assert rows["num_beams"].startswith("| `num_beams` | a whole number from 1 to 8 | 1 | Number of beams of ")
    assert "| a number from 0 to 2 | 0 |" in rows["temperature"]
    assert "or -1: not given | the model's |" in rows["max_new_tokens"]
    assert "`max_tokens`, `max_completion_tokens`" in rows["max_new_tokens"]


@pytest.mark.parametrize("table", TABLES)
def test_the_page_has_the_table_as_it_is(table: str) -> None:
    page = (ROOT / PAGES[table]).read_text()
    command = f"python tests/support/documents/tables.py {PAGES[table]}"
    assert f"<!-- {table}: written by `{command}` -->" in page
    assert with_tables(page) == page, f"not current; run {command}"


def test_tables_are_written_between_their_comments_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    for _ in range(2):
        main([str(page)])
        assert page.read_text() == f"# Title\n\n{BEGIN}\n\n{caption_options()}\n\n{END}\n\nafter\n"


@pytest.mark.parametrize("page", ["", f"{END}\n{BEGIN}\n", f"{BEGIN}\n<!-- end of settings -->\n"])
def test_a_page_without_a_place_is_an_error(page: str) -> None:
    with pytest.raises(ValueError, match="no place for a table"):
        with_tables(page)
    with pytest.raises(KeyError):
        with_tables(re.sub("options|settings", "nothing", f"{BEGIN}\n{END}"))


def test_without_a_page_the_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    printed = capsys.readouterr().out
    assert all(table() in printed for table in TABLES.values())
