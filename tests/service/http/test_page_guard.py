"""Requests of pages of other origins that need no preflight, and requests by names that are not the server's."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import HTMLResponse
from starlette.testclient import TestClient
from support.servers.good_requests import PATHS
from support.servers.live_app import create_app, on_a_port

from snapcap.service.api.app import Services
from snapcap.service.config.settings import HttpSettings
from snapcap.service.http.access import ApiKeys
from snapcap.service.http.bodies import BodyLimits
from snapcap.warmup.option import parse_host_names

Png = Callable[..., bytes]
APP = "https://app.example.com"
EVIL = "https://evil.example"


@pytest.fixture
def client_of(services: Services) -> Callable[..., TestClient]:
    def make(*, keys: ApiKeys | None = None, **settings: Any) -> TestClient:
        return TestClient(create_app(services, BodyLimits(1 << 20, 5.0), HttpSettings(**settings), keys))

    return make


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": EVIL}, 403),
        ({"Origin": EVIL, "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://localhost:3000", "Host": "localhost:8000"}, 403),
        ({"Origin": "http://localhost:3000", "Host": "localhost:8000", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://localhost:8000", "Host": "localhost:8000", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://localhost:8000", "Host": "localhost:8000"}, 200),
        ({"Origin": "http://localhost:8000", "Host": "LOCALHOST:8000", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "http://localhost", "Host": "localhost:80"}, 200),
        ({"Origin": "https://localhost", "Host": "localhost"}, 200),
        ({"Origin": "http://[::1]:8000", "Host": "[::1]:8000"}, 200),
        ({"Origin": f"{EVIL}.localhost", "Host": "localhost"}, 403),
        # A proxy that does not pass the name on: a browser says over https that it is the server's own page.
        ({"Origin": "https://c.example", "Host": "10.0.0.1:8000", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "http://c.example", "Host": "10.0.0.1:8000", "X-Forwarded-Host": "c.example"}, 200),
        ({"Origin": EVIL, "Host": "10.0.0.1:8000", "X-Forwarded-Host": "c.example"}, 403),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Origin": APP}, 200),
        ({"Origin": APP, "Sec-Fetch-Site": "cross-site"}, 200),
    ],
)
@pytest.mark.parametrize("form", [True, False], ids=["form", "raw"])
def test_a_post_without_a_preflight(
    client_of, engine, image: Png, headers: dict[str, str], status: int, form: bool
) -> None:
    body: dict[str, Any] = {"files": {"image": ("a.png", image(5))}} if form else {"content": image(5)}
    reply = client_of(origins=(APP,)).post("/v1/caption", headers=headers, **body)
    assert reply.status_code == status, reply.text
    assert len(engine.requests) == (status == 200)
    if status == 403:
        assert reply.json()["code"] == "origin_refused"
        assert "--allow-origin" in reply.json()["detail"]


@pytest.mark.parametrize(
    "fields",
    [
        [("Origin", EVIL), ("Origin", APP)],
        [("Origin", APP), ("Origin", EVIL)],
        [("Origin", EVIL), ("Origin", "http://testserver")],
        [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Site", "same-origin")],
        [("Sec-Fetch-Site", "none"), ("Sec-Fetch-Site", "cross-site")],
    ],
    ids=str,
)
def test_a_second_field_takes_nothing_back(client_of, engine, image: Png, fields: list[tuple[str, str]]) -> None:
    reply = client_of(origins=(APP,)).post("/v1/caption", content=image(5), headers=fields)
    assert (reply.status_code, engine.requests) == (403, [])


def test_every_origin_may_ask_where_that_is_allowed(client_of, image: Png) -> None:
    for origin in (EVIL, "null"):
        fields = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
        assert client_of(origins=("*",)).post("/v1/caption", content=image(), headers=fields).status_code == 200


@pytest.mark.parametrize("path", [*PATHS.values(), "/", "/api/chat", "/v1/captions", "/nowhere"])
def test_every_api_refuses_in_its_shape(client: TestClient, path: str) -> None:
    reply = client.post(path, headers={"Origin": EVIL})
    assert reply.status_code == 403
    assert "--allow-origin" in reply.text
    assert reply.headers["x-request-id"]


def test_a_link_from_elsewhere_leads_to_the_page(client: TestClient) -> None:
    fields = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/", headers=fields).status_code == 200


OWN = [
    "localhost", "LOCALHOST:8000", "app.localhost", "127.0.0.1:8000", "[::1]:8000", "[fe80::1]", "10.1.2.3",
    "snapcap", "snapcap:80", "snapcap.default.svc", "snapcap.default.svc.cluster.local:8000", "snapcap.d.svc.",
    "host.docker.internal:11434", "host.containers.internal", "photos.home.arpa",
    os.uname().nodename, f"{os.uname().nodename.partition('.')[0]}.local:8000", "",
]  # fmt: skip
OTHERS = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evil.svc.example",
    "svc.cluster.local.evil.example", "1.2.3.4.5.6.7.8.9.10.evil", "a@localhost.b", "evil.example.",
    "evil.example#.localhost", "docker.internal.evil.example", "local.example", "evil.arpa", "x.notlocal",
    "claimed-by-another-machine.local",
]  # fmt: skip


@pytest.mark.parametrize("host", OWN)
def test_names_that_are_the_servers(client_of, host: str) -> None:
    assert client_of().get("/startup", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", OTHERS)
def test_other_names_get_421(client_of, engine, image: Png, host: str) -> None:
    client = client_of()
    for method, path in (("GET", "/"), ("GET", "/startup"), ("GET", "/openapi.json"), ("POST", "/v1/caption")):
        fields = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
        reply = client.request(method, path, content=image(), headers=fields)
        assert (reply.status_code, reply.json()["code"]) == (421, "host_refused")
        assert "--allowed-host" in reply.json()["detail"]
    assert engine.requests == []
    for path in ("/livez", "/readyz", "/health", "/v2/health/ready", "/v2/models/fake/ready", "/metrics"):
        assert client.get(path, headers={"Host": host}).status_code == 200


def test_the_operator_names_others(client_of) -> None:
    def status(host: str, *names: str, keys: ApiKeys | None = None) -> int:
        key = {"Authorization": "Bearer secret"}
        client = client_of(hosts=parse_host_names(",".join(names)) if names else (), keys=keys)
        return client.get("/startup", headers={"Host": host, **key}).status_code

    assert status("c.example:8000", "C.example") == 200
    assert status("localhost", "c.example") == 200
    assert status("a.c.example", "c.example") == 421
    assert status("a.c.example", "*.c.example") == 200
    assert status("c.example", "*.c.example") == 421
    assert status("ac.example", "*.c.example") == 421
    assert status("evil.example", "*") == 200
    keys = ApiKeys(["secret"])
    assert status("evil.example", keys=keys) == 200  # a page of it has no key
    assert status("evil.example", "c.example", keys=keys) == 421


@pytest.mark.parametrize("text", ["c.example:80", "http://c.example", "", "a b", "*.*", "c.*", "-a", "a/b"])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(ValueError, match="without a port"):
        parse_host_names(text)


SEND = """async ([address, kind]) => {
  const body = new FormData();
  body.append("image", new Blob(["x"]), "a.png");
  try { await fetch(address + "/v1/caption", {method: "POST", mode: kind, body}); return "sent"; }
  catch { return "failed"; }
}"""


def test_a_real_browser_is_refused(services: Services, chromium: Any) -> None:
    async def page_of_another(scope: Any, receive: Any, send: Any) -> None:
        await HTMLResponse("<!doctype html><title>another</title>")(scope, receive, send)

    with (
        on_a_port(page_of_another) as another,
        on_a_port(create_app(services, BodyLimits(1 << 20, 5.0), HttpSettings())) as server,
    ):
        page = chromium.new_page()
        page.goto(another)
        assert page.evaluate(SEND, [server, "no-cors"]) == "sent"
        page.goto(server)
        assert page.evaluate(SEND, [server, "cors"]) == "sent"
        page.close()
    counted = {
        code: services.registry.get_sample_value("snapcap_requests_total", {"api": "caption", "code": code})
        for code in ("403", "422")
    }
    assert counted == {"403": 1.0, "422": 1.0}
