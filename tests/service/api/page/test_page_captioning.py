"""One picture on the page: token by token, stopped, with options, as a copy where the server refuses the file."""

import io
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page, expect
from support.fakes.thread_decoder import PLAIN_CONFIG
from support.servers.browser import PATIENCE_MS
from support.servers.page import give

from snapcap.models.text import Region
from snapcap.service.api.app import Services
from snapcap.service.captioning.model_defaults import Answer, ModelDefaults, Resolved
from snapcap.service.engine.request import CaptionRequest, Completion

OpenPage = Callable[..., Page]
# As the server of these tests.
MAX_BODY = 1 << 20


def icon(red: int) -> bytes:
    """An ICO, which a browser shows and the server refuses."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (red, 0, 0)).save(file, "ICO", sizes=[(8, 8)], bitmap_format="bmp")
    return file.getvalue()


def noise(size: tuple[int, int]) -> bytes:
    """A PNG that is about as large as its pixels."""
    file = io.BytesIO()
    Image.effect_noise(size, 90).convert("RGB").save(file, "PNG", compress_level=0)
    return file.getvalue()


@pytest.fixture
def begun(engine, address: str, open_page: OpenPage, image) -> tuple[Page, CaptionRequest]:
    """A page that waits for the words of a picture, and the request, whose tokens the test gives."""
    engine.gate.clear()
    page = open_page(address)
    expect(page.locator("#state-word")).to_have_text("ready")
    give(page, image())
    assert engine.submitted.wait(30)
    (sent,) = engine.requests
    return page, sent


def test_words_are_shown_as_they_come(begun: tuple[Page, CaptionRequest]) -> None:
    page, sent = begun
    assert sent.on_token is not None
    expect(page.locator("#progress")).to_have_text("Looking…")
    for token, text in ((5, "5"), (6, "5 6")):
        sent.on_token(token)
        expect(page.locator("#caption")).to_have_text(text)
        expect(page.locator("#measured")).to_be_hidden()
    assert page.locator("#spoken").inner_text() == ""  # not word by word
    sent.future.set_result(Completion((5, 6, 7), "length", "aot", 0.001, 0.002, 0.003))
    expect(page.locator("#caption")).to_have_text("5 6 7")
    expect(page.locator("#spoken")).to_have_text("Caption: 5 6 7")
    expect(page.locator("#by")).to_contain_text("3 tokens, cut at the limit, model fake, compiled.")
    expect(page.locator("#legend")).to_contain_text("3.0\u00a0ms")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()


class Naming(ModelDefaults):
    """Names a box and the outline of a mask, in pixels of the image."""

    def answer(self, resolved: Resolved, tokens: Sequence[int], size: tuple[int, int]) -> Answer:
        mask = Region("", (0, 0, 4, 4), ((0, 0, 4, 0, 4, 4), (1, 1, 2, 2)))
        return Answer("two parts", [Region("<b>a hat</b>", (1, 2, 5, 6)), mask])


def test_parts_that_an_answer_names_are_drawn_over_the_picture(
    services: Services, engine, address: str, open_page: OpenPage, image
) -> None:
    model: Any = services.captioner._model
    page = open_page(address)
    expect(page.locator("#state-word")).to_have_text("ready")
    give(page, image(3))
    expect(page.locator("#caption")).to_have_text("3 7")
    expect(page.locator("#regions")).to_be_hidden()
    naming = Naming(model.defaults.tokenizer(None), PLAIN_CONFIG)
    services.captioner.attach(engine, "fake", model.image_decoder, naming)
    give(page, image(4))
    drawing = page.locator("#regions")
    expect(drawing).to_have_attribute("viewBox", "0 0 8 8")
    expect(drawing.locator("text").first).to_have_text("<b>a hat</b>")
    outlines = [each.get_attribute("points") for each in drawing.locator("polygon").all()]
    assert outlines == ["1 2 5 2 5 6 1 6", "0 0 4 0 4 4", "1 1 2 2"]
    assert drawing.bounding_box() == page.locator("#preview").bounding_box()
    assert json.loads(page.evaluate("() => gallery.lines()[0]"))["regions"][0]["box"] == [1, 2, 5, 6]


def test_stop_keeps_the_words_and_frees_the_slot(begun: tuple[Page, CaptionRequest]) -> None:
    page, sent = begun
    assert sent.on_token is not None
    sent.on_token(5)
    expect(page.locator("#caption")).to_have_text("5")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#notice")).to_have_text("Stopped.")
    expect(page.locator("#caption")).to_have_text("5")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    page.wait_for_function("() => panel.running === null")
    for _ in range(PATIENCE_MS // 10):
        if sent.future.cancelled():
            break
        page.wait_for_timeout(10)
    assert sent.future.cancelled()


def test_a_stream_that_breaks_says_so(begun: tuple[Page, CaptionRequest]) -> None:
    page, sent = begun
    assert sent.on_token is not None
    sent.on_token(5)
    expect(page.locator("#caption")).to_have_text("5")
    sent.future.set_exception(RuntimeError("broken"))
    expect(page.get_by_role("alert")).to_contain_text("Caption not finished")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
    expect(page.locator("#result")).to_be_hidden()


def test_options_are_asked_for_and_named_beside_the_fold(engine, address: str, open_page: OpenPage, image) -> None:
    page = open_page(address)
    expect(page.locator("#state-word")).to_have_text("ready")  # which names the model: until then nothing streams
    page.locator("#options > summary").click()
    expect(page.get_by_role("button", name="Caption again")).to_be_disabled()
    page.get_by_label("Prompt").fill("two words")
    page.get_by_label("Longest").fill("9")
    give(page, image(3))
    expect(page.locator("#caption")).to_have_text("two words 3 7")
    (asked,) = engine.requests
    assert (len(asked.prompt_ids), asked.params.max_new_tokens, asked.on_token is None) == (2, 9, False)
    page.get_by_label("Beams").fill("4")
    expect(page.locator("#options > summary")).to_have_text(
        "Options: prompt “two words”, 4 beams, at most 9 tokens"
    )
    page.get_by_role("button", name="Caption again").click()
    page.wait_for_function("() => gallery.pictures.length === 2")
    assert engine.requests[1].params.num_beams == 4
    assert engine.requests[1].on_token is None  # a search has no token before its end
    page.get_by_label("Beams").fill("9")
    page.get_by_role("button", name="Caption again").click()
    assert page.locator("#beams:invalid").count() == 1
    assert len(engine.requests) == 2


def test_a_model_with_tasks_offers_them(address: str, open_page: OpenPage, image) -> None:
    page = open_page(address, expected="status of 422")
    expect(page.locator("#state-word")).to_have_text("ready")
    expect(page.locator("#task-field")).to_be_hidden()
    page.evaluate("() => options.onReport({ ...start.report, tasks: ['caption', { name: 'detailed_caption' }] })")
    page.evaluate("() => (options.onReport = () => null)")  # this server's model has none
    page.locator("#options > summary").click()
    page.get_by_label("Task").select_option("detailed_caption")
    expect(page.locator("#options-set")).to_have_text(": detailed caption")
    with page.expect_request("**/v1/chat/completions") as asked:
        give(page, image())
    assert asked.value.post_data_json["task"] == "detailed_caption"


def test_a_file_that_only_the_browser_can_read_is_sent_as_a_copy(engine, address: str, open_page: OpenPage) -> None:
    page = open_page(address, expected="status of 422")
    give(page, icon(90))
    expect(page.locator("#caption")).to_have_text("90 7")
    expect(page.locator("#notice")).to_have_text(
        "This server does not read such files: a copy of 8 × 8 pixels was sent."
    )
    assert len(engine.requests) == 1


def test_a_picture_that_is_too_large_is_scaled_down(address: str, open_page: OpenPage) -> None:
    large = noise((1600, 800))
    assert len(large) > 3 * MAX_BODY
    page = open_page(address, expected="status of 413|ERR_CONNECTION")
    give(page, large)
    expect(page.locator("#measured")).to_be_visible()
    expect(page.locator("#notice")).to_contain_text(
        re.compile(r"Too large for this server: a copy of \d+ × \d+ pixels")
    )


def test_a_folder_is_named_and_nothing_is_sent(engine, address: str, open_page: OpenPage) -> None:
    page = open_page(address)
    page.evaluate(
        """() => {
            const folder = new File([], "folder");
            folder.slice = () => ({ arrayBuffer: () => Promise.reject(new DOMException("", "NotReadableError")) });
            panel.take(folder);
        }"""
    )
    expect(page.get_by_role("alert")).to_contain_text("it is a folder, or was moved or changed")
    assert engine.requests == []


def test_a_caption_can_be_copied(address: str, open_page: OpenPage, image) -> None:
    page = open_page(address, permissions=["clipboard-read", "clipboard-write"])
    give(page, image(5))
    page.get_by_role("button", name="Copy the caption", exact=True).click()
    expect(page.locator("#copy")).to_have_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == "5 7"
    page.evaluate("() => (navigator.clipboard.writeText = () => Promise.reject(new Error('none')))")
    page.locator("#copy").click()  # as on http, where there is no such clipboard
    assert page.evaluate("() => navigator.clipboard.readText()") == "5 7"


def test_what_the_page_says_of_the_model_is_what_the_server_says(
    services: Services, address: str, open_page: OpenPage
) -> None:
    attached: Any = services.captioner._model
    defaults = ModelDefaults(attached.defaults.tokenizer(None), PLAIN_CONFIG)
    defaults.family = "git"
    services.captioner.attach(attached.engine, "my/captioner", attached.image_decoder, defaults)
    page = open_page(address)
    expect(page.locator("#lede")).to_contain_text("with the model my/captioner.")
    expect(page.locator("#start-line")).to_contain_text("git")
    expect(page.locator("#samples")).to_be_hidden()
    text = page.locator("body").inner_text() + json.dumps(page.evaluate("() => PHASES"))
    assert "GPT" not in text
    assert "demo" not in text


# Shows a reply, and returns where its first and its last character are, and the height of the caption.
SHOWN = """(caption) => {
    panel.show({ reply: { caption, model: "fake", tokens: 3, finish_reason: "stop" }, took: 1 });
    const place = (at) => {
        const range = document.createRange();
        range.setStart(byId("caption").firstChild, at);
        range.setEnd(byId("caption").firstChild, at + 1);
        return range.getBoundingClientRect().x;
    };
    return [place(0), place(caption.length - 1), byId("caption").clientHeight];
}"""


def test_a_caption_has_its_direction_and_its_lines(address: str, open_page: OpenPage, image) -> None:
    page = open_page(address)
    expect(page.locator("#state-word")).to_have_text("ready")
    first, stop, height = page.evaluate(SHOWN, "a cat.")
    assert first < stop
    assert page.evaluate(SHOWN, "a\n\ncat.")[2] > 2.5 * height
    first, stop, _ = page.evaluate(SHOWN, "قطة تجلس.")
    assert stop < first
    page.evaluate("() => gallery.add([Object.assign(new Picture(new File(['x'], 'a'), {}), { state: 'waiting' })])")
    said = page.locator(".said")
    assert said.evaluate("(each) => [each.dir, getComputedStyle(each).whiteSpace]") == ["auto", "pre-wrap"]


def test_an_empty_caption_is_copied_as_it_is(address: str, open_page: OpenPage) -> None:
    page = open_page(address)
    expect(page.locator("#state-word")).to_have_text("ready")
    page.evaluate("() => (copy = (text) => Promise.resolve((document.title = `copied ${text}`)))")
    page.evaluate(
        "() => panel.show({ reply: { caption: '', model: 'a', tokens: 0, finish_reason: 'stop' }, took: 1 })"
    )
    expect(page.locator("#caption")).to_have_text("(an empty caption)")
    page.locator("#copy").click()
    expect(page).to_have_title("copied ")


def test_what_is_no_file_leaves_the_running_caption_and_its_stop(begun: tuple[Page, CaptionRequest]) -> None:
    page, _ = begun
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.evaluate("() => take([])")
    expect(page.get_by_role("alert")).to_contain_text("That was not a file.")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
