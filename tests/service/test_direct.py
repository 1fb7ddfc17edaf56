"""What captions images goes past FastAPI; everything else, and what only FastAPI can tell apart, goes to it."""

from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

from snapcap.service.api.app import Application, Services, create_app
from snapcap.service.api.bodies.body import BodyLimits


@pytest.fixture
def app(services: Services, monkeypatch: pytest.MonkeyPatch) -> Application:
    """FastAPI's part of it is missing."""

    async def missing(self: Application, scope, receive, send) -> None:
        raise RuntimeError("FastAPI was asked")

    monkeypatch.setattr(Application, "fastapi", missing)
    app = create_app(services, BodyLimits(1 << 20, 5.0))
    assert isinstance(app, Application)
    return app


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
    ],
)
def test_captions_go_past_fastapi(app: Application, image: Callable[..., bytes], path: str, status: int) -> None:
    reply = TestClient(app).post(path, content=image(), headers={"Content-Type": "image/png"})
    assert reply.status_code == status
    assert reply.headers.get_list("x-request-id")


@pytest.mark.parametrize(("method", "path"), [("GET", "/livez"), ("GET", "/v1/caption"), ("POST", "/nowhere")])
def test_the_rest_goes_to_fastapi(app: Application, method: str, path: str) -> None:
    assert TestClient(app).request(method, path).status_code == 500


def test_under_a_prefix_of_the_servers_fastapi_finds_the_route(
    services: Services, image: Callable[..., bytes]
) -> None:
    app = create_app(services, BodyLimits(1 << 20, 5.0))
    reply = TestClient(app, root_path="/prefix").post("/prefix/v1/caption", content=image())
    assert reply.status_code == 200
