"""Provides headless Chromium through Playwright, and pages that may only talk to the server under test.

Every test run loads these fixtures; only tests of the page need Playwright.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = 90_000  # a page takes 20 s beside four busy loops on two CPUs; Playwright waits five, or thirty


@pytest.fixture(scope="module")
def chromium() -> "Iterator[Browser]":
    """Starts a browser for the tests of a module, not of the session: until the browser is stopped, its event loop
    is the one of the main thread."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)

    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("CHROMIUM IS NOT INSTALLED: apt-get install chromium TO TEST THE PAGE IN A BROWSER")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(_ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: "Browser") -> "Iterator[Callable[..., Page]]":
    """``open_page(address, **context options)`` -> the page, loaded.

    ``expected`` is a pattern of the console's errors that the test is about: Chromium logs each reply that is an
    error. Any other error, and any request that leaves the server, fails the test."""
    with ExitStack() as exits:
        wrong: list[str] = []

        def open_one(address: str, expected: str = "(?!)", **options: Any) -> "Page":
            context = chromium.new_context(**options)
            exits.callback(context.close)
            context.set_default_timeout(PATIENCE_MS)
            page = context.new_page()
            origin = "/".join(address.split("/")[:3])
            context.on("request", lambda request: _check(request.url, origin, wrong))
            page.on("pageerror", lambda error: wrong.append(f"thrown: {error}"))
            page.on("console", lambda message: _heard(message.type, message.text, expected, wrong))
            page.goto(address)
            return page

        yield open_one
        assert wrong == []


def _check(url: str, origin: str, wrong: list[str]) -> None:
    if not url.startswith((f"{origin}/", "data:", "blob:")):
        wrong.append(f"left the server: {url}")


def _heard(kind: str, text: str, expected: str, wrong: list[str]) -> None:
    if kind in ("error", "warning") and not re.search(expected, text):
        wrong.append(f"{kind}: {text}")
