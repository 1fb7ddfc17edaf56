"""The page in a real browser before services that a test moves by hand: a start as it happens, what goes wrong."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import FilePayload, Page, Route, expect
from support.servers.live_app import create_app, on_a_port
from support.servers.page import assert_accessible, give, phases

from snapcap.service.api.app import Services
from snapcap.service.captioning.captioner import Start
from snapcap.service.errors import EngineFailed
from snapcap.service.http.access import ApiKeys
from snapcap.service.http.bodies import BodyLimits
from snapcap.service.limits import QueueFull
from snapcap.warmup.progress.timeline import Phase, Timeline

OpenPage = Callable[..., Page]
# Whether the bar of the last phase has become longer.
GROWN = """(before) => {
    const fills = document.querySelectorAll("#phases li .fill");
    return fills[fills.length - 1].getBoundingClientRect().width > before;
}"""


def test_a_start_is_shown_while_it_happens(make_services, serve_with, serve, open_page: OpenPage) -> None:
    timeline = Timeline(time.monotonic() - 2)  # not since pytest's exec, beside which every phase is short
    timeline.add(Phase("interpreter", 0.0, 2.0))
    services: Services = make_services(timeline=timeline)
    with services.timeline.phase("import_torch"):
        page = open_page(serve(services))
        expect(page.locator("#state")).to_have_text("starting: import PyTorch")
        expect(page.locator("#lede")).to_contain_text("starting right now")
        expect(phases(page)).to_have_count(2)
        expect(phases(page).last).to_have_class(re.compile("running"))
        expect(page.locator("#meanings dt")).to_have_text(
            ["Python", "import PyTorch"]
        )  # no phase that did not begin
        box = phases(page).last.locator(".fill").bounding_box()
        assert box is not None
        page.wait_for_function(GROWN, arg=box["width"])
    services.status.expect((1, 4), "cpu", "float32")
    expect(page.locator("#buckets li[data-state=pending]")).to_have_count(4)
    expect(page.locator("#buckets li .word").first).to_have_text("pending")
    expect(page.locator("#phases")).to_be_visible()  # while there is something to watch
    with services.timeline.phase("warm_encoder"):
        services.status.update("encoder", 1, "warm", "aot", 0.01, services.timeline.now())
        expect(page.locator("#buckets li[data-state=warm]")).to_have_count(1)
    for component in ("encoder", "decoder"):
        for size in (1, 4):
            services.status.update(component, size, "warm", "aot", 0.01, services.timeline.now())
    serve_with(services)
    services.timeline.mark("ready")
    services.status.started()
    expect(page.locator("#state")).to_have_text("ready: compiled")
    expect(page.locator("#buckets li[data-state=warm]")).to_have_count(4)
    expect(page.locator("#lede")).to_contain_text("s from precompiled code.")
    expect(page.locator(".running")).to_have_count(0)
    expect(page.locator("#phases")).to_be_hidden()


def test_a_picture_that_comes_too_early_is_captioned_when_it_is_ready(
    make_services, serve_with, serve, open_page: OpenPage, image
) -> None:
    services: Services = make_services()
    page = open_page(serve(services))
    with services.timeline.phase("import_torch"):
        expect(page.locator("#state-phase")).to_have_text(": import PyTorch")
        give(page, image(7))
        expect(page.locator("#progress")).to_contain_text("still starting (import PyTorch). Your picture is next.")
    serve_with(services)
    services.timeline.mark("ready")
    expect(page.locator("#caption")).to_have_text("7 7")


def test_a_start_that_fails_says_why(make_services, serve, open_page: OpenPage) -> None:
    services: Services = make_services()
    services.readiness.fail("no such folder: ./captioner")
    page = open_page(serve(services))
    expect(page.locator("#state")).to_have_text("failed")
    expect(page.locator("#story")).to_have_text("no such folder: ./captioner")
    assert_accessible(page)


def test_a_server_that_goes_and_comes_back_is_noticed(
    make_services, serve_with, new_client, open_page: OpenPage, image
) -> None:
    services = serve_with(make_services())
    services.timeline.mark("ready")
    with on_a_port(new_client(services).app) as address:
        page = open_page(address + "/", expected="ERR_CONNECTION_(REFUSED|RESET)")
        expect(page.locator("#state-word")).to_have_text("ready")
    give(page, image())
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
    page.evaluate("() => start.poll()")
    expect(page.locator("#state-word")).to_have_text("not reachable")
    with on_a_port(new_client(services).app, int(address.rpartition(":")[2])):
        expect(page.locator("#state-word")).to_have_text("ready")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator("#caption")).to_have_text("200 7")


def test_a_full_queue_can_be_tried_again(engine, address: str, open_page: OpenPage, image) -> None:
    engine.refuse = QueueFull(3)
    page = open_page(address, expected="status of 429")
    give(page, image())
    expect(page.get_by_role("alert")).to_contain_text("Too many requests")
    expect(page.get_by_role("alert")).to_contain_text("The queue is full")
    assert_accessible(page)
    engine.refuse = None
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#caption")).to_have_text("200 7")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_the_model_is_chosen_with_its_state_beside_its_name(
    make_services, serve_with, serve, open_page: OpenPage, image
) -> None:
    first, second = (serve_with(make_services()) for _ in range(2))
    captioners = {"first": first.captioner, "second": second.captioner}
    keepers = []
    for name, services in zip(captioners, (first, second), strict=True):
        start = Start(services.readiness, services.timeline, services.status)
        keepers.append(SimpleNamespace(state="ready", created=0.0, start=start))
        services.captioner.join(name, keepers[-1], captioners)
    keepers[1].state = "absent"
    page = open_page(serve(first))
    select = page.get_by_label("Model", exact=True)
    expect(select.locator("option")).to_have_text(["first: ready", "second: absent"])
    expect(select).to_have_value("first")
    select.focus()
    page.keyboard.press("ArrowDown")
    expect(select).to_have_value("second")
    expect(page.locator("#state-word")).to_have_text("absent")
    expect(page.locator("#lede")).to_contain_text("with the model second. It is absent: the next picture wakes it.")
    assert_accessible(page)
    with page.expect_request("**/v1/chat/completions") as asked:
        give(page, image(7))
    assert asked.value.post_data_json["model"] == "second"
    expect(page.locator("#caption")).to_have_text("7 7")
    keepers[1].state = "ready"
    second.timeline.mark("ready")
    expect(select.locator("option").last).to_have_text("second: ready")
    expect(page.locator("#state-word")).to_have_text("ready")


def test_one_model_is_not_chosen(address: str, open_page: OpenPage) -> None:
    page = open_page(address)
    expect(page.locator("#state-word")).to_have_text("ready")
    expect(page.get_by_label("Model", exact=True)).to_be_hidden()


def test_other_models_of_a_new_server_replace_the_old(address: str, open_page: OpenPage) -> None:
    page = open_page(address)
    expect(page.locator("#state-word")).to_have_text("ready")
    page.evaluate("() => clearTimeout(start.timer)")
    for names in (("a", "b"), ("c", "2")):
        states = dict.fromkeys(names, "ready")
        page.evaluate("(report) => models.onReport(report, null)", {"model": names[0], "models": states})
        select = page.get_by_label("Model", exact=True)
        assert {each.get_attribute("value") for each in select.locator("option").all()} == set(names)
        expect(select).to_have_value(names[0])


def test_our_own_failure_names_the_request(engine, address: str, open_page: OpenPage, image) -> None:
    engine.fail = EngineFailed()
    page = open_page(address, expected="status of 500")
    expect(page.locator("#state-word")).to_have_text("ready")  # which names the model: until then nothing streams
    with page.expect_response("**/v1/chat/completions") as reply:
        give(page, image())
    expect(page.locator("#problem-id")).to_contain_text(reply.value.headers["x-request-id"])


@pytest.fixture
def guarded(services: Services) -> Iterator[str]:
    """The address of a server that wants the key `right`."""
    services.timeline.mark("ready")
    app = create_app(services, BodyLimits(1 << 20, 5.0), keys=ApiKeys(["right"]))
    with on_a_port(app) as address:
        yield address + "/"


def enter_key(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_label("API key").press("Enter")


def test_a_key_is_asked_for_and_used(guarded: str, open_page: OpenPage, image) -> None:
    page = open_page(guarded, expected="status of 401")
    expect(page.locator("#state-word")).to_have_text("needs a key")
    expect(page.get_by_label("API key")).to_be_visible()
    give(page, image())
    expect(page.get_by_role("alert")).to_contain_text("There is no API key")
    expect(page.get_by_label("API key")).to_be_focused()
    assert_accessible(page)
    enter_key(page, "wrong")
    expect(page.get_by_role("alert")).to_contain_text("The API key is not valid")
    enter_key(page, "ключ")  # no header can carry it: the form says so
    assert page.locator("#key:invalid").count() == 1
    enter_key(page, "right")
    expect(page.locator("#caption")).to_have_text("200 7")
    expect(page.get_by_label("API key")).to_be_hidden()
    expect(page.locator("#state-word")).to_have_text("ready")


def test_a_wrong_key_is_named_without_a_picture(guarded: str, open_page: OpenPage) -> None:
    page = open_page(guarded, expected="status of 401")
    expect(page.get_by_label("API key")).to_be_visible()
    enter_key(page, "wrong")
    expect(page.get_by_role("alert")).to_contain_text("The API key is not valid")
    expect(page.get_by_label("API key")).to_be_focused()
    enter_key(page, "right")
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#state-word")).to_have_text("ready")


def choose_two(page: Page, image: Callable[[int], bytes]) -> None:
    files: list[FilePayload] = [
        {"name": f"{number}.png", "mimeType": "image/png", "buffer": image(number)} for number in (1, 2)
    ]
    page.locator("#file").set_input_files(files)


def test_many_pictures_wait_for_the_key(guarded: str, open_page: OpenPage, image) -> None:
    page = open_page(guarded, expected="status of 401")
    expect(page.locator("#state-word")).to_have_text("needs a key")
    with page.expect_request_finished(lambda request: request.url.endswith("/v1/captions")):
        choose_two(page, image)
    expect(page.locator("#visit-count")).to_have_text("0 of 2 pictures captioned")
    expect(page.locator(".card").first).to_contain_text("Waiting…")
    enter_key(page, "right")
    expect(page.locator("#visit-count")).to_have_text("2 captions")


def test_a_key_that_comes_before_the_refusal_is_used(guarded: str, open_page: OpenPage, image) -> None:
    page = open_page(guarded, expected="status of 401")
    expect(page.locator("#state-word")).to_have_text("needs a key")
    held: list[Route] = []
    page.route("**/v1/captions", lambda route: held.append(route), times=1)  # noqa: PLW0108  no method of a list
    with page.expect_request("**/v1/captions"):
        choose_two(page, image)
    enter_key(page, "right")
    expect(page.locator("#state-word")).to_have_text("ready")
    held[0].continue_()
    expect(page.locator("#visit-count")).to_have_text("2 captions")
    expect(page.get_by_label("API key")).to_be_hidden()


def test_with_a_key_the_links_show_it_too(guarded: str, open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(guarded, expected="status of 401")
    enter_key(page, "right")
    expect(page.locator("#state-word")).to_have_text("ready")
    with page.expect_download() as download:
        page.get_by_role("link", name="Metrics").first.click()
    assert download.value.suggested_filename.startswith("metrics")
    download.value.save_as(tmp_path / "metrics")
    assert (tmp_path / "metrics").read_text().startswith("# HELP")


def test_while_a_key_is_missing_nothing_is_asked_again(guarded: str, open_page: OpenPage) -> None:
    page = open_page(guarded, expected="status of 401")
    expect(page.locator("#state-word")).to_have_text("needs a key")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(1500)  # without an answer it would ask each second
    assert asked == []


def test_the_last_of_two_pictures_wins(engine, address: str, open_page: OpenPage, image) -> None:
    page = open_page(address)
    engine.gate.clear()
    give(page, image(1))
    engine.submitted.wait()
    expect(page.locator("#progress")).to_have_text("Looking…")
    give(page, image(2))
    engine.gate.set()
    expect(page.locator("#caption")).to_have_text("2 7")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_background_build_and_its_swaps_are_followed(
    services: Services, address: str, open_page: OpenPage
) -> None:
    fetched = SimpleNamespace(result="miss", reason="nothing was published", seconds=0.1, bytes_fetched=0)
    artifacts: Any = SimpleNamespace(fetched=fetched, key="a1", factors={"kind": "aot"})
    services.status.fetched(artifacts)
    services.status.expect((1, 4), "cpu", "float32")
    for component in ("encoder", "decoder"):
        for size in (1, 4):
            services.status.update(component, size, "eager", "eager", 0.01, 1.0)
    services.status.building(state="building", done=3, of=12)
    page = open_page(address)
    expect(page.locator("#artifacts")).to_contain_text("not there yet (nothing was published)")
    expect(page.locator("#build-text")).to_contain_text("3 of 12")
    expect(page.get_by_role("progressbar")).to_have_js_property("value", 3)
    expect(page.locator("#state")).to_have_text("ready: compiling 3 of 12")
    expect(page.locator("#start-line")).to_contain_text("cpu, float32; compiling 3 of 12")
    expect(page.locator("#phases")).to_be_hidden()  # what is ready is one line, which opens
    page.locator("#start > summary").click()
    expect(page.locator("#buckets li").last).to_contain_text("plain PyTorch, swap pending")
    services.status.update("encoder", 1, "warm", "aot")
    services.status.update("encoder", 4, "failed", "eager")
    expect(page.locator("#buckets li[data-state=warm]")).to_contain_text("compiled")
    expect(page.locator("#buckets li[data-state=failed]")).to_contain_text("stays plain")
    assert_accessible(page)
    services.status.building(state="failed", error="no C++ compiler")
    expect(page.locator("#build-text")).to_contain_text(
        "failed, and the plain model goes on serving: no C++ compiler"
    )


def test_text_of_a_model_or_a_server_is_never_markup(services: Services, serve, open_page: OpenPage) -> None:
    services.status.building(state="failed", error="<img src=x onerror=alert(1)><b>bold</b>")
    services.status.fail("<script>document.title = 'taken'</script>")
    page = open_page(serve(services))
    expect(page.locator("#build-text")).to_contain_text("<img src=x onerror=alert(1)>")
    expect(page.locator("#story")).to_contain_text("<script>")
    assert page.title() == "snapcap"
    assert page.locator("#build-text b").count() == 0
