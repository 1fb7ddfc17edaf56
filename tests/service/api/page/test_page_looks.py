"""The page and the reference for every eye: the rules of WCAG, light and dark, contrast of bars, motion."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect
from support.servers.page import assert_accessible, give, phases

from snapcap.service.api.app import Services

OpenPage = Callable[..., Page]
OPENED = "main details:not(.operation, .schema), .group .operation:first-of-type, .schema:nth-of-type(-n + 3)"
SCHEMES = ("light", "dark")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("path", ["", "docs"])
def test_the_pages_are_accessible(address: str, open_page: OpenPage, image, scheme: str, path: str) -> None:
    page = open_page(address + path, color_scheme=scheme)
    if path:
        expect(page.locator(".operation").first).to_be_visible()
    else:
        expect(page.locator("#state-word")).to_have_text("ready")
        assert_accessible(page)
        give(page, image())
        expect(page.locator("#caption")).not_to_be_empty()
    # Of the reference the first route of each group, which between them have every kind of field.
    page.evaluate(f"() => document.querySelectorAll({OPENED!r}).forEach((each) => (each.open = true))")
    if path:
        expect(page.locator(".tryout")).to_have_count(7)
    assert_accessible(page)


def test_light_and_dark_are_two_pictures(address: str, open_page: OpenPage) -> None:
    def brightness(scheme: str) -> int:
        page = open_page(address, color_scheme=scheme)
        colour = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in re.findall(r"\d+", colour)[:3])

    assert brightness("light") > 600
    assert brightness("dark") < 150


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bars_and_their_ground_differ_enough(address: str, open_page: OpenPage, scheme: str) -> None:
    """WCAG 1.4.11: 3 to 1 for what is not text."""
    page = open_page(address, color_scheme=scheme)
    colours: dict[str, str] = page.evaluate(
        """() => {
            const style = getComputedStyle(document.documentElement);
            const names = ["surface", "before", "import", "fetch", "load", "warm"];
            return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
        }"""
    )
    ground = luminance(colours.pop("surface"))
    for name, colour in colours.items():
        light, dark = sorted((luminance(colour), ground), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, name


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, as WCAG 2.2 defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("motion", "moves"), [("no-preference", True), ("reduce", False)])
def test_nothing_moves_where_motion_is_reduced(
    make_services, serve, open_page: OpenPage, motion: str, moves: bool
) -> None:
    services: Services = make_services()
    with services.timeline.phase("import_torch"):
        page = open_page(serve(services), reduced_motion=motion)
        expect(phases(page).last).to_have_class(re.compile("running"))
        running = "() => document.getAnimations().some((each) => each.playState === 'running')"
        if moves:
            page.wait_for_function(running)
        else:
            page.wait_for_timeout(300)
            assert not page.evaluate(running)


def test_long_names_fit_a_narrow_screen(address: str, open_page: OpenPage) -> None:
    """WCAG 1.4.10: at 320 pixels nothing is scrolled to the side."""
    page = open_page(address, viewport={"width": 320, "height": 640})
    expect(page.locator("#state-word")).to_have_text("ready")
    page.evaluate(
        """() => {
            clearTimeout(start.timer);
            const model = "W".repeat(60);
            drawStart({ ...start.report, model });
            panel.show({ reply: { caption: "a cat", model, tokens: 3, finish_reason: "stop" }, took: 1 });
            byId("prompt").value = model;
            options.draw();
        }"""
    )
    assert page.evaluate("() => document.documentElement.scrollWidth") == 320
