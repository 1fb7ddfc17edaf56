"""Drives the page in a browser, and checks its accessibility."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page

# Contrast, names, roles, labels, structure; axe's "best-practice" is taste.
_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


def give(page: Page, image: bytes) -> None:
    page.locator("#file").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": image})


def phases(page: Page) -> Locator:
    return page.locator("#phases li")


def assert_accessible(page: Page) -> None:
    """Every rule of WCAG 2.2 A and AA that axe knows: contrast, names, roles, labels, structure."""
    found = Axe().run(page, options={"runOnly": _RULES})
    assert found.violations_count == 0, found.generate_report()
    assert len(found.response["passes"]) > 10
