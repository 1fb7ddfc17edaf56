"""Many pictures on the page: in pieces, each with its caption or its error, as JSON lines, and cleared."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import FilePayload, Page, expect
from support.servers.page import assert_accessible, give

from snapcap.service.limits import QueueFull

OpenPage = Callable[..., Page]


def give_all(page: Page, *pictures: tuple[str, bytes]) -> None:
    files: list[FilePayload] = [{"name": name, "mimeType": "", "buffer": data} for name, data in pictures]
    page.locator("#file").set_input_files(files)


def icon(red: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (red, 0, 0)).save(file, "ICO", sizes=[(8, 8)], bitmap_format="bmp")
    return file.getvalue()


def test_many_pictures_go_in_pieces_and_each_has_its_answer(
    make_services, serve_with, serve, open_page: OpenPage, image, tmp_path: Path
) -> None:
    services = serve_with(make_services(queue_size=64))
    page = open_page(serve(services), permissions=["clipboard-read", "clipboard-write"])
    pieces: list[str] = []
    page.on("request", lambda request: pieces.append(request.url) if request.method == "POST" else None)
    page.locator("#options > summary").click()
    page.get_by_label("Longest").fill("9")
    good = [(f"{number}.png", image(number)) for number in range(18)]
    give_all(page, *good, ("letter.txt", b"hello"), ("icon.ico", icon(90)))
    cards = page.locator(".card")
    expect(cards).to_have_count(20)
    expect(page.locator("#visit-count")).to_have_text("19 captions, 1 failed")
    said = [card.locator(".said").inner_text() for card in cards.all()]
    assert said[:18] == [f"{number} 7" for number in range(18)]
    assert said[18].startswith("Unprocessable image. ")
    assert said[19] == "90 7"
    assert cards.nth(18).get_attribute("data-state") == "failed"
    assert all(url.endswith("/v1/captions?max_new_tokens=9") for url in pieces)
    assert len(pieces) == 3  # 16, 4, and the copy of the one that was refused
    assert_accessible(page)

    cards.nth(3).get_by_role("button", name="Copy the caption of 3.png").click()
    expect(cards.nth(3).locator("button")).to_have_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == "3 7"

    with page.expect_download() as download:
        page.get_by_role("button", name="Download JSONL").click()
    assert download.value.suggested_filename == "captions.jsonl"
    download.value.save_as(tmp_path / "captions.jsonl")
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "captions.jsonl").read_text().splitlines()
    ]
    assert [line["file_name"] for line in lines][-2:] == ["letter.txt", "icon.ico"]
    assert lines[0]["caption"] == "0 7"
    assert lines[0]["options"] == {"max_new_tokens": 9}
    assert (lines[18]["status"], lines[18]["code"]) == (422, "unprocessable_image")
    assert "caption" not in lines[18]

    give(page, image(77))  # one more picture is of this visit too, and comes first
    expect(cards).to_have_count(21)
    expect(cards.first.locator(".said")).to_have_text("77 7")
    page.get_by_role("button", name="Clear").click()
    expect(cards).to_have_count(0)
    expect(page.locator("#visit")).to_be_hidden()
    assert page.evaluate("() => [localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]


def test_a_full_server_is_asked_again_and_then_says_so(engine, address: str, open_page: OpenPage, image) -> None:
    engine.refuse = QueueFull(1)
    page = open_page(address, expected="status of 429")
    page.evaluate("() => (RETRY.most = 1)")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
    give_all(page, ("a.png", image(1)), ("b.png", image(2)))
    expect(page.locator("#visit-count")).to_have_text("0 captions, 2 failed")
    expect(page.locator(".card").first).to_contain_text("Too many requests. The queue is full")
    assert len(asked) == page.evaluate("() => RETRY.times")
    engine.refuse = None
    page.get_by_role("button", name="Try the failed again").click()
    expect(page.locator("#visit-count")).to_have_text("2 captions")


def test_a_batch_is_stopped(engine, address: str, open_page: OpenPage, image) -> None:
    engine.gate.clear()
    page = open_page(address)
    give_all(page, ("a.png", image(1)), ("b.png", image(2)))
    assert engine.submitted.wait(30)
    expect(page.locator(".card").first.locator(".said")).to_have_text("Captioning…")
    page.locator("#visit-stop").click()
    expect(page.locator("#visit-count")).to_have_text("0 captions, 2 failed")
    expect(page.locator(".card").last).to_contain_text("You stopped before it was captioned.")


def test_pieces_that_are_too_large_are_halved(address: str, open_page: OpenPage) -> None:
    pictures = []
    for number in range(3):
        file = io.BytesIO()
        Image.effect_noise((450, 450), 90).convert("RGB").save(file, "PNG", compress_level=0)
        pictures.append((f"{number}.png", file.getvalue()))
    page = open_page(address, expected="status of 413|ERR_CONNECTION")
    give_all(page, *pictures)  # 600 KB each, where a body may have 1 MiB
    expect(page.locator("#visit-count")).to_have_text("3 captions")


def test_the_history_is_bounded(address: str, open_page: OpenPage, image) -> None:
    page = open_page(address)
    expect(page.locator("#state-word")).to_have_text("ready")
    page.evaluate(
        """() => {
            batch.run = () => null;
            const files = Array.from({ length: 210 }, (_, number) => new File(["x"], `${number}.png`));
            batch.take(files);
        }"""
    )
    expect(page.locator(".card")).to_have_count(200)
    # All rows are part of the page: a phone shows no bar where a box of its own could be scrolled.
    assert page.evaluate("() => byId('gallery').scrollHeight <= byId('gallery').clientHeight")
    assert page.evaluate("() => byId('gallery').clientHeight > 3 * innerHeight")
    expect(page.get_by_role("alert")).to_contain_text("The first 200 were taken")
    page.evaluate("() => batch.settle(gallery.pictures, null, { caption: 'over' })")
    give(page, image(8))
    expect(page.locator(".card").first.locator(".said")).to_have_text("8 7")
    expect(page.locator(".card")).to_have_count(200)


def test_pictures_that_wait_are_not_dropped_for_others(address: str, open_page: OpenPage) -> None:
    page = open_page(address)
    expect(page.locator("#state-word")).to_have_text("ready")
    page.evaluate(
        """() => {
            batch.run = () => null;
            const files = (count, name) => Array.from({ length: count }, () => new File(["x"], name));
            batch.take(files(30, "old"));
            batch.settle([...gallery.pictures], null, { caption: "over" });
            batch.take(files(150, "first"));
            batch.take(files(100, "second"));
        }"""
    )
    expect(page.get_by_role("alert")).to_contain_text("The first 50 were taken")
    kept = page.evaluate("() => gallery.pictures.map(({ name }) => name)")
    assert kept == ["second"] * 50 + ["first"] * 150
    expect(page.locator(".card")).to_have_count(200)
