"""How often the page asks how the server is: fast while something moves, seldom while nobody sees it."""

from collections.abc import Callable

from playwright.sync_api import Page, expect
from support.servers.live_app import on_a_port

from snapcap.service.api.app import Services

OpenPage = Callable[..., Page]
PROMISED_MS = 2000
HANGS = """() => {
    window.fetch = (_, { signal }) => new Promise((_, reject) => {
        signal.addEventListener("abort", () => reject(new DOMException("", "AbortError")));
    });
    start.polling = null;
    start.poll();
}"""


def test_a_server_that_goes_and_comes_back_is_noticed_within_two_seconds(
    services: Services, new_client, open_page: OpenPage
) -> None:
    """Of the page's clock, which the test moves."""
    services.timeline.mark("ready")
    with on_a_port(new_client(services).app) as address:
        page = open_page(address + "/", expected="ERR_CONNECTION|ERR_EMPTY")
        expect(page.locator("#state-word")).to_have_text("ready")
        page.clock.install()
        page.evaluate("() => start.poll()")
    page.clock.run_for(PROMISED_MS)
    expect(page.locator("#state-word")).to_have_text("not reachable")
    with on_a_port(new_client(services).app, int(address.rpartition(":")[2])):
        page.clock.run_for(PROMISED_MS)
        expect(page.locator("#state-word")).to_have_text("ready")


def test_a_server_that_hangs_is_not_answering(address: str, open_page: OpenPage) -> None:
    page = open_page(address)
    expect(page.locator("#state-word")).to_have_text("ready")
    page.clock.install()
    page.evaluate(HANGS)
    assert page.evaluate("() => PAUSES.ready + POLL_TIMEOUT") < PROMISED_MS
    page.clock.run_for(page.evaluate("() => POLL_TIMEOUT"))
    expect(page.locator("#state-word")).to_have_text("not answering")


def test_it_asks_often_while_something_moves_and_seldom_unseen(address: str, open_page: OpenPage) -> None:
    page = open_page(address)
    expect(page.locator("#state-word")).to_have_text("ready")
    ready = {"state": "ready"}
    cases: list[tuple[object, bool, int]] = [
        ({"state": "starting"}, False, 200),
        (ready | {"build": {"state": "building"}}, False, 500),
        (ready | {"build": {"state": "waiting"}}, False, 500),
        (ready | {"build": {"state": "published"}}, False, 900),
        (None, False, 900),
        ({"state": "starting"}, True, 10_000),
        (ready | {"build": {"state": "building"}}, True, 10_000),
        (ready | {"build": None}, True, 0),
        (None, True, 0),
    ]
    for report, hidden, pause in cases:
        given = page.evaluate(
            """([report, hidden]) => {
                Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
                start.report = report;
                return start.pause();
            }""",
            [report, hidden],
        )
        assert given == pause, (report, hidden)


def test_a_page_that_nobody_sees_asks_nothing_until_it_is_seen(address: str, open_page: OpenPage) -> None:
    page = open_page(address)
    expect(page.locator("#state-word")).to_have_text("ready")
    page.evaluate("() => Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    page.evaluate("() => start.poll()")
    page.clock.install()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(60_000)
    assert asked == []
    page.evaluate("() => Object.defineProperty(document, 'hidden', { value: false, configurable: true })")
    with page.expect_request("**/startup"):
        page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")
