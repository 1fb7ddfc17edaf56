"""Every endpoint is found by its path, at whatever prefix; what is missing says what there is instead."""

import re
from collections.abc import Callable

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from support.servers.live_app import create_app

from snapcap.service.api.app import Application, Services, create_operations_app
from snapcap.service.config.settings import HttpSettings
from snapcap.service.http.bodies import BodyLimits


@pytest.fixture
def app(services: Services) -> Application:
    return create_app(services, BodyLimits(1 << 20, 5.0))


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/caption", 200),
        ("/", 200),
        ("/models/fake", 200),
        ("/models/other/name", 404),
        ("/v1/captions", 415),
        ("/v1/chat/completions", 415),
        ("/v2/models/fake/infer", 400),
        ("/v2/models/fake/versions/1/infer", 400),
        ("/v2/models/fake/versions/2/infer", 404),
        ("/v2/models/fake/ready", 405),
        ("/livez", 405),
        ("/nowhere", 404),
    ],
)
@pytest.mark.parametrize("prefix", ["", "/prefix"])
def test_a_path_has_its_endpoint(
    app: Application, image: Callable[..., bytes], path: str, status: int, prefix: str
) -> None:
    client = TestClient(app, root_path=prefix)
    reply = client.post(prefix + path, content=image(), headers={"Content-Type": "image/png"})
    assert reply.status_code == status
    assert len(reply.headers.get_list("x-request-id")) == 1


def test_a_path_that_only_begins_like_the_prefix_is_nowhere(app: Application) -> None:
    client = TestClient(app, root_path="/snap")
    assert client.get("/snap/livez").status_code == 200
    reply = client.get("/snaplivez")
    assert (reply.status_code, reply.json()["instance"]) == (404, "/snaplivez")


def test_a_path_too_long_for_any_model_is_nowhere(app: Application) -> None:
    client = TestClient(app)
    for length, detail in ((100, "is not served here"), (1100, "There is nothing at")):
        reply = client.get(f"/v2/models/{'a' * length}")
        assert (reply.status_code, detail in reply.json()["error"]) == (404, True)
    assert client.put(f"/v2/models/{'a' * 1100}").status_code == 404, "and no method is allowed there"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/caption/", "/v1/caption"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("//v1/chat/completions/", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/readyz/", "/readyz"),
        ("/v1/captain", ""),
        ("//", ""),
        ("/" * 3000, ""),
    ],
)
def test_an_address_that_was_joined_wrongly_is_told_the_right_one(app: Application, path: str, meant: str) -> None:
    reply = TestClient(app, base_url="http://localhost").request("GET", f"http://localhost{path}")
    assert reply.status_code == 404
    assert set(re.findall("did you mean (.*?)[?]", reply.text)) == ({meant} if meant else set())


def test_an_endpoint_takes_the_request_and_no_other_route_has_its_name(app: Application) -> None:
    routes = [route for group in app.routes.groups for route in group.routes]
    assert len({route.name for route in routes}) == len(routes) > 20
    assert all(isinstance(route, Route) for route in routes)


def test_what_captions_is_not_ready_before_it_is_imported(services: Services, image: Callable[..., bytes]) -> None:
    client = TestClient(create_operations_app(services, HttpSettings(), None))
    for path in ("/livez", "/readyz", "/startup", "/metrics"):
        assert client.get(path).status_code == 200
    for reply in (client.post("/v1/caption", content=image()), client.get("/nowhere")):
        assert (reply.status_code, reply.json()["code"]) == (503, "not_ready")
        assert int(reply.headers["retry-after"]) >= 1


def test_what_is_no_request_is_told_so(app: Application) -> None:
    with pytest.raises(WebSocketDisconnect), TestClient(app).websocket_connect("/v1/caption"):
        pass
    with TestClient(app) as client:  # whose lifespan the host announces
        assert client.get("/livez").status_code == 200
