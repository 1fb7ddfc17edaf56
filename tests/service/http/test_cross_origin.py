"""Pages of other origins: what a browser asks beforehand, what it is shown, and a real one that does both."""

import base64
from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import HTMLResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from support.servers.good_requests import PATHS
from support.servers.live_app import create_app, on_a_port

from snapcap.service.api.app import Services
from snapcap.service.config.settings import HttpSettings
from snapcap.service.http.access import ApiKeys
from snapcap.service.http.bodies import BodyLimits
from snapcap.service.limits import QueueFull
from snapcap.warmup.option import parse_origins

APP = "https://app.example.com"
# What the `openai` package for JavaScript sends beside Content-Type.
HEADERS = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-retry-count"


@pytest.fixture
def client_of(services: Services) -> Callable[..., TestClient]:
    def make(*origins: str, keys: ApiKeys | None = None) -> TestClient:
        http = HttpSettings(origins=parse_origins(",".join(origins)) if origins else ())
        return TestClient(create_app(services, BodyLimits(1 << 20, 5.0), http, keys))

    return make


def preflight(client: TestClient, origin: str, method: str = "POST", path: str = "/v1/caption", **more: str) -> Any:
    asked = {"Origin": origin, "Access-Control-Request-Method": method, "Access-Control-Request-Headers": HEADERS}
    return client.options(path, headers={**asked, **more})


def test_a_preflight_is_answered_without_a_key_and_says_for_how_long(client_of) -> None:
    client = client_of("http://localhost:3000", APP, keys=ApiKeys(["secret"]))
    for path in (*PATHS.values(), "/v1/captions", "/v1/models", "/api/chat", "/api/tags", "/"):
        for method in ("GET", "POST"):
            reply = preflight(client, APP, method, path)
            assert (reply.status_code, reply.content) == (204, b"")
            assert reply.headers["access-control-allow-origin"] == APP
            assert method in reply.headers["access-control-allow-methods"].split(", ")
            assert reply.headers["access-control-allow-headers"] == HEADERS
            assert int(reply.headers["access-control-max-age"]) >= 600
            assert "Origin" in reply.headers["vary"]
            assert reply.headers["x-request-id"]
            assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"origin": "https://evil.example"}, "origin"),
        ({"origin": f"{APP}.evil.example"}, "origin"),
        ({"origin": "http://app.example.com"}, "origin"),
        ({"origin": "null"}, "origin"),
        ({"method": "DELETE"}, "method"),
    ],
)
def test_what_is_not_allowed_is_refused_with_a_sentence(client_of, change: dict[str, str], why: str) -> None:
    reply = preflight(client_of(APP), **{"origin": APP, **change})
    assert (reply.status_code, reply.json()["code"]) == (403, "origin_refused")
    assert f"({why})" in reply.json()["detail"]
    assert "--allow-origin" in reply.json()["detail"]
    assert (why == "origin") == ("access-control-allow-origin" not in reply.headers)
    assert reply.json()["request_id"] == reply.headers["x-request-id"]


def test_replies_and_refusals_can_be_read(client_of, engine, image) -> None:
    client = client_of(APP, keys=ApiKeys(["secret"]))
    key = {"Authorization": "Bearer secret", "Origin": APP}
    engine_refuses = QueueFull(3)
    replies = [
        (client.post("/v1/caption", content=image(), headers=key), 200),
        (client.post("/v1/caption", content=image(), headers={"Origin": APP}), 401),
        (client.post("/v1/caption", content=b"no image", headers=key), 422),
        (client.get("/nowhere", headers=key), 404),
        (client.get("/v1/caption", headers=key), 405),
    ]
    engine.refuse = engine_refuses
    replies.append((client.post("/v1/caption", content=image(), headers=key), 429))
    for reply, status in replies:
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] == APP
        assert "Origin" in reply.headers["vary"]
        readable = reply.headers["access-control-expose-headers"].split(", ")
        assert {"X-Request-Id", "Retry-After", "X-Snapcap-Ignored"} <= set(readable)
    other = client.get("/livez", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "Origin" in other.headers["vary"]  # for caches between


def test_every_origin_is_without_credentials(client_of) -> None:
    client = client_of("*")
    for reply in (preflight(client, APP), client.get("/livez", headers={"Origin": APP})):
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in reply.headers
    private = {"Access-Control-Request-Private-Network": "true"}
    assert preflight(client, APP, **private).status_code == 403
    named = preflight(client_of(APP), APP, **private)
    assert (named.status_code, named.headers["access-control-allow-private-network"]) == (204, "true")


def test_it_is_off_unless_an_origin_is_named(client: TestClient) -> None:
    refused = preflight(client, APP)
    assert (refused.status_code, refused.json()["code"]) == (403, "origin_refused")
    assert "--allow-origin" in refused.json()["detail"]
    assert client.options("/v1/caption").status_code == 405, "not of a page"
    reply = client.get("/livez", headers={"Origin": APP})
    assert not [name for name in reply.headers if name.startswith(("access-control", "vary"))]


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("https://App.Example.com", (APP,)),
        (f"{APP}:443, http://localhost:80,http://[::1]:3000", (APP, "http://localhost", "http://[::1]:3000")),
        ("chrome-extension://abcdef,*", ("chrome-extension://abcdef", "*")),
        ("https://app.example.com/", None),
        ("app.example.com", None),
        ("https://a b", None),
        ("https://*.example.com", None),
        (f"https://{'a' * 300}", None),
        ("", None),
    ],
)
def test_origins_are_spelt_as_a_browser_does(text: str, origins: tuple[str, ...] | None) -> None:
    if origins is not None:
        assert parse_origins(text) == origins
        return
    with pytest.raises(ValueError, match="without a path"):
        parse_origins(text)


ASK = """async ([address, image, key]) => {
  const parts = [{type: "image_url", image_url: {url: `data:image/png;base64,${image}`}}];
  const body = {model: "fake", messages: [{role: "user", content: [{type: "text", text: "What?"}, ...parts]}]};
  const headers = {"Content-Type": "application/json", "Authorization": `Bearer ${key}`, "X-Stainless-Lang": "js"};
  try {
    const options = {method: "POST", headers, body: JSON.stringify(body)};
    const reply = await fetch(address + "/v1/chat/completions", options);
    const said = await reply.json();
    const ignored = reply.headers.get("X-Snapcap-Ignored");
    return [reply.status, said.error ? said.error.code : said.choices[0].message.content, ignored];
  } catch (error) { return [0, error.name, null]; }
}"""


def test_a_real_browser_shows_a_page_of_an_allowed_origin_everything(
    services: Services, chromium: Any, image: Callable[..., bytes]
) -> None:
    async def page_of_another(scope: Scope, receive: Receive, send: Send) -> None:
        await HTMLResponse("<!doctype html><title>another</title>")(scope, receive, send)

    picture = base64.b64encode(image(5)).decode()
    with on_a_port(page_of_another) as allowed, on_a_port(page_of_another) as refused:
        http = HttpSettings(origins=parse_origins(allowed))
        with on_a_port(create_app(services, BodyLimits(1 << 20, 5.0), http, ApiKeys(["secret"]))) as server:
            page = chromium.new_page()
            page.goto(allowed)
            assert page.evaluate(ASK, [server, picture, "secret"]) == [200, "5 7", "text"]
            assert page.evaluate(ASK, [server, picture, "wrong"]) == [401, "invalid_api_key", None]
            page.goto(refused)
            assert page.evaluate(ASK, [server, picture, "secret"]) == [0, "TypeError", None]
            page.close()


def test_preflights_are_counted_and_those_that_are_refused_logged(
    client_of, services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    def counted(code: int) -> float:
        labels = {"api": "preflight", "code": str(code)}
        return services.registry.get_sample_value("snapcap_requests_total", labels) or 0.0

    caplog.set_level("INFO", "snapcap.access")
    client = client_of(APP)
    assert preflight(client, APP, **{"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    refused = preflight(client, "https://evil.example")
    assert (counted(204), counted(403)) == (1.0, 1.0)
    (line,) = [record.fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]
    assert (line["method"], line["path"], line["status"], line["code"]) == (
        "OPTIONS",
        "/v1/caption",
        403,
        "origin_refused",
    )
    assert line["request_id"] == refused.headers["x-request-id"]
