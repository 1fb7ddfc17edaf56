"""What the documents promise is held by tests that exist, and their links lead somewhere."""

import re
from pathlib import Path

import pytest
from support.documents.pages import pages

ROOT = Path(__file__).parents[2]
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`")
_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]+)?\)")


@pytest.mark.parametrize("document", pages())
def test_links_lead_somewhere(document: str) -> None:
    """Also on GitHub, and where mkdocs is not installed, which looks at the site's."""
    path = ROOT / document
    for target, anchor in _LINK.findall(path.read_text()):
        file = path.parent / target if target else path
        assert file.exists(), target
        headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor[1:] in {_slug(each) for each in headings}, (target, anchor)


def test_every_promise_has_its_tests() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    rows = [row for row in text.splitlines() if row.startswith("|") and not row.startswith(("| promise", "|---"))]
    assert len(rows) > 30
    for row in rows:
        named = _TEST.findall(row)
        assert named, row
        for file, test in named:
            source = (ROOT / file).read_text()
            assert not test or f"def {test}(" in source, f"{file} has no {test}"


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
