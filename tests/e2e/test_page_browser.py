"""The page in a real browser, before a real server with the demo model: every way to give it a picture."""

import base64
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from support.servers.server_process import ServerProcess

OpenPage = Callable[..., Page]
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
MAX_BODY = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ("--backend", "eager", "--buckets", "1,4", "--max-body-bytes", str(MAX_BODY))
    with ServerProcess(*options, "--cache-dir", str(tmp_path_factory.mktemp("cache"))) as process:
        yield process.wait_ready()


@pytest.fixture
def address(server: ServerProcess) -> str:
    return f"http://127.0.0.1:{server.port}/"


@pytest.fixture(scope="module")
def sample(demo_folder: Path) -> tuple[Path, str]:
    captions = json.loads((demo_folder / "samples" / "captions.json").read_text())
    name = sorted(captions)[-1]
    return demo_folder / "samples" / name, captions[name]


def drop(page: Page, selector: str, data: bytes, name: str, kind: str) -> None:
    """What the browser does when a file is let go over an element."""
    transfer = page.evaluate_handle(
        """([data, name, type]) => {
            const transfer = new DataTransfer();
            const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
            transfer.items.add(new File([bytes], name, { type }));
            return transfer;
        }""",
        [base64.b64encode(data).decode(), name, kind],
    )
    for event in ("dragover", "drop"):
        page.dispatch_event(selector, event, {"dataTransfer": transfer})


def test_a_dropped_picture_is_captioned(open_page: OpenPage, address: str, sample: tuple[Path, str]) -> None:
    page = open_page(address)
    drop(page, "#drop", sample[0].read_bytes(), "picture.png", "image/png")
    expect(page.locator("#caption")).to_have_text(sample[1])
    expect(page.locator("#spoken")).to_have_text(f"Caption: {sample[1]}")
    expect(page.get_by_alt_text("The picture you gave")).to_be_visible()
    expect(page.locator("#by")).to_contain_text("model demo, plain PyTorch")
    assert page.locator("#legend div").count() == 4
    widths = [box["width"] for part in page.locator("#times span").all() if (box := part.bounding_box())]
    assert len(widths) == 4
    assert sum(widths) <= page.locator("#times").bounding_box()["width"] + 1


def test_a_picture_may_fall_anywhere_on_the_page(open_page: OpenPage, address: str, sample) -> None:
    page = open_page(address)
    drop(page, "footer", sample[0].read_bytes(), "no-type", "")
    expect(page.locator("#caption")).to_have_text(sample[1])
    assert page.url == address


def test_a_pasted_picture_is_captioned(open_page: OpenPage, address: str, sample: tuple[Path, str]) -> None:
    page = open_page(address, permissions=["clipboard-read", "clipboard-write"])
    page.evaluate(
        """async (data) => {
            const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
            const picture = new Blob([bytes], { type: "image/png" });
            await navigator.clipboard.write([new ClipboardItem({ "image/png": picture })]);
        }""",
        base64.b64encode(sample[0].read_bytes()).decode(),
    )
    page.keyboard.press("Control+V")
    expect(page.locator("#caption")).to_have_text(sample[1])


def test_the_keyboard_is_enough(open_page: OpenPage, address: str, sample: tuple[Path, str]) -> None:
    page = open_page(address)
    page.on("filechooser", lambda chooser: chooser.set_files(sample[0]))
    expect(page.locator("#state-word")).to_have_text("ready")
    seen = []
    while (focused := focus_next(page)) != "choose":
        seen.append(focused)
        assert len(seen) < 10, seen
    page.keyboard.press("Enter")
    captioned(page, sample[1])

    assert [focus_next(page) for _ in range(2)] == ["copy", "summary"]
    page.keyboard.press("Enter")
    assert focus_next(page) == "prompt"
    page.keyboard.type("two hearts")
    page.keyboard.press("Enter")
    captioned(page, re.compile("^two hearts "))
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    assert any(focus_next(page) == "sample" for _ in range(4))
    page.keyboard.press("Space")
    captioned(page, "a small blue square left of a large purple star on sand")
    assert any(focus_next(page) == "summary" for _ in range(12))
    page.keyboard.press("Enter")
    expect(page.locator("#phases")).to_be_visible()


def captioned(page: Page, text: str | re.Pattern[str]) -> None:
    """The caption is there, and its stream has ended: a button to stop it no longer takes the focus."""
    expect(page.locator("#caption")).to_have_text(text)
    expect(page.locator("#stop")).to_be_hidden()


def focus_next(page: Page) -> str:
    """Tab; what has the focus, which must be seen to have it."""
    page.keyboard.press("Tab")
    focused: dict[str, Any] = page.evaluate(
        """() => {
            const [element, style] = [document.activeElement, getComputedStyle(document.activeElement)];
            const name = element.id || element.className || element.localName;
            return { name, outline: style.outlineStyle, width: parseFloat(style.outlineWidth) };
        }"""
    )
    assert focused["outline"] == "solid", focused
    assert focused["width"] >= 2
    name: str = focused["name"]
    return name


def test_every_sample_of_the_page_is_captioned_right(open_page: OpenPage, address: str, demo_folder: Path) -> None:
    captions = json.loads((demo_folder / "samples" / "captions.json").read_text())
    page = open_page(address)
    samples = page.locator(".sample").all()
    assert len(samples) == 4
    for button, name in zip(samples, ("pair-1", "inside-2", "row-1", "group-2"), strict=True):
        button.click()
        expect(page.locator("#caption")).to_have_text(captions[f"{name}.png"])


def test_what_is_no_picture_gets_the_server_s_sentence(open_page: OpenPage, address: str, sample) -> None:
    page = open_page(address, expected="status of 422")
    drop(page, "#drop", b"hello", "letter.txt", "text/plain")
    expect(page.get_by_role("alert")).to_contain_text("Unprocessable image")
    expect(page.locator("#problem-detail")).to_contain_text("not a")
    expect(page.locator("#problem-id")).to_contain_text("log: ")
    expect(page.locator("#result")).to_be_hidden()
    expect(page.locator("#again")).to_be_hidden()  # the same bytes would fail again
    drop(page, "#drop", sample[0].read_bytes(), "picture.png", "image/png")
    expect(page.locator("#caption")).to_have_text(sample[1])
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_picture_that_is_too_large_says_so(open_page: OpenPage, address: str) -> None:
    page = open_page(address, expected="status of 413|ERR_CONNECTION")
    drop(page, "#drop", b"\0" * (3 * MAX_BODY), "large.png", "image/png")
    expect(page.locator("#problem-title")).to_have_text("Body too large")
    expect(page.locator("#problem-detail")).to_contain_text("send a smaller image")


def test_something_dropped_that_is_no_file_is_explained(open_page: OpenPage, address: str) -> None:
    page = open_page(address)
    transfer = page.evaluate_handle("() => new DataTransfer()")
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})
    expect(page.get_by_role("alert")).to_contain_text("not a file")


@pytest.mark.parametrize("path", ["", "docs"])
def test_nothing_is_wider_than_a_phone(open_page: OpenPage, address: str, path: str) -> None:
    page = open_page(address + path, expected="status of 422", **PHONE)
    if path:
        expect(page.locator(".operation").first).to_be_visible()
    else:
        drop(page, "#drop", b"hello", "letter.txt", "text/plain")
        expect(page.get_by_role("alert")).to_be_visible()
        page.locator(".sample").first.tap()
        expect(page.locator("#caption")).not_to_be_empty()
    page.evaluate("() => document.querySelectorAll('details').forEach((each) => (each.open = true))")
    scroll, seen = page.evaluate(
        "() => [document.scrollingElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert scroll <= seen == PHONE["viewport"]["width"]


def test_what_can_be_touched_is_large_enough_for_a_finger(open_page: OpenPage, address: str) -> None:
    page = open_page(address, **PHONE)
    for target in page.locator("button:visible, .bar a:visible, footer a:visible, summary:visible").all():
        box = target.bounding_box()
        assert box is not None
        assert box["height"] >= 24, target.inner_text()  # WCAG 2.2, target size (minimum)


def test_the_start_is_shown_as_it_was(open_page: OpenPage, address: str, server: ServerProcess) -> None:
    page = open_page(address)
    expect(page.locator("#state")).to_have_attribute("data-state", "ready")
    report = server.startup()
    line = f"Ready in {report['marks']['ready']:.2f}\u00a0s: plain PyTorch"
    expect(page.locator("#start > summary b")).to_have_text(line)
    expect(page.locator("#phases")).to_be_hidden()
    page.locator("#start > summary").click()
    expect(page.locator("#phases")).to_be_visible()
    rows = page.locator("#phases li").all()
    assert [row.get_attribute("data-phase") for row in rows] == [phase["name"] for phase in report["phases"]]
    tracks = page.locator("#phases .track").first.bounding_box()
    assert tracks is not None
    for row, phase in zip(rows, report["phases"], strict=True):
        bar = row.locator(".fill").bounding_box()
        assert bar is not None
        scale = tracks["width"] / report["marks"]["ready"]
        assert bar["x"] - tracks["x"] == pytest.approx(phase["start"] * scale, abs=1)
        assert bar["width"] == pytest.approx(max((phase["end"] - phase["start"]) * scale, 3), abs=1)
    expect(page.locator("#lede")).to_contain_text("with the model demo.")
    expect(page.locator("#lede")).to_contain_text(f"Ready in {report['marks']['ready']:.2f}\u00a0s")
    cells = page.locator("#buckets .cells li")
    assert cells.count() == len(report["buckets"]) == 4
    assert {cell.get_attribute("data-state") for cell in cells.all()} == {"eager"}
    expect(page.locator("#artifacts")).to_contain_text("was not looked for")


def test_the_reference_shows_every_route_and_option(open_page: OpenPage, address: str, server) -> None:
    page = open_page(address + "docs")
    expect(page.locator(".operation").first).to_be_visible()
    document = server.call("/openapi.json")[1]
    shown = {" ".join(summary.split()[:2]) for summary in page.locator(".operation summary").all_inner_texts()}
    assert shown == {
        f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods
    }
    page.locator("#post-\\/v1\\/caption summary").click()
    for name in ("?max_new_tokens=", "Body as application/json", "504"):
        expect(page.locator("#post-\\/v1\\/caption").get_by_text(name, exact=True).first).to_be_visible()
    page.locator("#post-\\/v1\\/caption").get_by_role("link", name="Caption", exact=True).click()
    expect(page.locator("#object-Caption")).to_contain_text("finish_reason")
