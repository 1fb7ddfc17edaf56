"""Behind a proxy that serves the server under a prefix, everything stays within it."""

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urljoin

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from support.servers.live_app import create_app, on_a_port
from support.servers.page import give

from snapcap.service.api.app import Services
from snapcap.service.config.settings import HttpSettings
from snapcap.service.http.bodies import BodyLimits
from snapcap.warmup.option import parse_root_path

Png = Callable[..., bytes]
HEADER = "X-Forwarded-Prefix"


@pytest.fixture
def under(services: Services) -> TestClient:
    """A server that was told its prefix."""
    return TestClient(application(services), follow_redirects=False)


def application(services: Services) -> Any:
    return create_app(services, BodyLimits(1 << 20, 5.0), HttpSettings(root_path="/apps/cap"))


@pytest.mark.parametrize("prefix", ["", "/apps/cap"])
def test_the_proxy_may_take_the_prefix_away_or_leave_it(under: TestClient, image: Png, prefix: str) -> None:
    assert under.post(f"{prefix}/v1/caption", content=image(5)).json()["caption"] == "5 7"
    assert under.get(f"{prefix}/livez").status_code == 200
    assert under.post(f"{prefix}/v1/models/other").status_code in (404, 405)
    assert under.get(f"{prefix}/").headers["content-type"].startswith("text/html")
    assert under.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/apps/cap"}]


def test_another_path_with_the_same_letters_is_another(under: TestClient) -> None:
    assert under.get("/apps/capital/livez").status_code == 404
    assert under.get("/apps/cap/apps/cap/livez").status_code == 404


def test_a_redirect_stays_within(under: TestClient, services: Services, image: Png) -> None:
    """To the slash that the page's links need."""
    reply = under.get("/apps/cap")
    assert (reply.status_code, reply.headers["location"]) == (307, "cap/")
    assert urljoin("https://h/apps/cap", reply.headers["location"]) == "https://h/apps/cap/"
    assert under.post("/apps/cap", content=image(5)).json() == [{"generated_text": "5 7"}]
    mounted = TestClient(Starlette(routes=[Mount("/m", application(services))]), follow_redirects=False)
    assert mounted.get("/m/openapi.json").json()["servers"] == [{"url": "/m"}]


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_have_no_link_that_leaves_the_prefix(client: TestClient, path: str) -> None:
    text = client.get(path).text
    links = re.findall(r'<a [^>]*href="([^"]*)"', text)
    assert len(links) >= 3
    for link in links:
        assert urljoin(f"https://h/apps/cap{path}", link).startswith("https://h/apps/cap/")
        assert client.get(urljoin(path, link)).status_code == 200
    assert "location.origin" not in text


PREFIXES = ["/cap", "/cap/", "/a/b-c/d_e.f~1", "/" + "a" * 255]
NOT_PREFIXES = [
    "", "/", "cap", "//evil.example", "/cap//x", "/..", "/cap/../x", "/./x", "/cap/.", "https://evil.example",
    "/cap?x", "/cap#x", "/a b", "/cap\t", "/<script>", '/"', "/'", "/\\evil", "/%2e%2e", "/caf\u00e9",
    "/cap,/other", "/a:b", "/@evil", "/" + "a" * 256, "/javascript:alert(1)", "/cap;x", "/{x}",
]  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_proxy_may_name_the_prefix(client: TestClient, prefix: str) -> None:
    reply = client.get("/openapi.json", headers={HEADER: prefix})
    assert reply.json()["servers"] == [{"url": prefix.rstrip("/")}]
    assert reply.json()["paths"] == client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("prefix", NOT_PREFIXES)
def test_what_is_no_plain_path_is_not_believed(client: TestClient, prefix: str) -> None:
    """Any client can send the header."""
    plain = client.get("/openapi.json")
    for path in ("/openapi.json", "/", "/docs"):
        given = client.get(path, headers=[(HEADER.encode(), prefix.encode("latin-1"))])
        assert given.content == client.get(path).content
    assert "servers" not in plain.json()
    if prefix.strip("/"):
        with pytest.raises(ValueError, match="be a path such as /cap"):
            parse_root_path(prefix)


def test_no_cache_keeps_a_prefix_for_others(client: TestClient, under: TestClient) -> None:
    for fields in ({}, {HEADER: "/cap"}):
        reply = client.get("/openapi.json", headers=fields)
        assert (reply.headers["vary"], reply.headers["cache-control"]) == (HEADER, "no-store")
    twice = client.get("/openapi.json", headers=[(HEADER, "/a"), (HEADER, "/b")])
    assert "servers" not in twice.json()
    assert under.get("/openapi.json", headers={HEADER: "/x"}).json()["servers"] == [{"url": "/apps/cap"}]
    for path in ("/", "/docs"):
        assert client.get(path, headers={HEADER: "/evil"}).content == client.get(path).content


@pytest.mark.parametrize("start", ["/apps/cap", "/apps/cap/"])
@pytest.mark.parametrize("taken_away", [True, False])
def test_the_pages_work_in_a_browser(
    services: Services, open_page: Callable[..., Any], image: Png, start: str, taken_away: bool
) -> None:
    """A proxy that takes the prefix away tells no more of it, and answers with the page at the prefix itself."""
    from playwright.sync_api import expect

    told = application(services)
    untold = create_app(services, BodyLimits(1 << 20, 5.0))
    outside: list[str] = []

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        if not scope["path"].startswith("/apps/cap"):
            outside.append(scope["path"])
        if taken_away:
            path = scope["path"].removeprefix("/apps/cap") or "/"
            await untold({**scope, "path": path, "raw_path": path.encode()}, receive, send)
        else:
            await told(scope, receive, send)

    services.timeline.mark("ready")
    services.status.started()
    with on_a_port(proxy) as url:
        page = open_page(url + start)
        expect(page.locator("#state-word")).to_have_text("ready")
        expect(page.locator("#curl")).to_contain_text(f"{url}/apps/cap/v1/caption")
        give(page, image(5))
        expect(page.locator("#caption")).to_have_text("5 7")
        page.get_by_role("link", name="API", exact=True).click()
        expect(page.locator("#about")).to_contain_text("Captions images")
        operation = page.locator("[id='post-/v1/caption']")
        operation.locator("summary").first.click()
        expect(operation.locator(".program")).to_contain_text(f"{url}/apps/cap/v1/caption")
        page.get_by_role("link", name="Try it").click()
        expect(page.locator("#state-word")).to_have_text("ready")
    assert outside == []
