"""The OpenAPI document: valid, complete, and true of what is answered."""

import base64
import json
import re
from collections.abc import Callable
from typing import Any

from openapi_spec_validator import validate
from starlette.testclient import TestClient
from support.servers.live_app import create_app

from snapcap.service.api.app import Application, Services
from snapcap.service.captioning.options import NAMES
from snapcap.service.config.settings import HttpSettings
from snapcap.service.http.access import ApiKeys, is_open
from snapcap.service.http.bodies import BodyLimits

Png = Callable[..., bytes]


def test_the_openapi_document_is_valid_and_covers_every_route(client: TestClient, document) -> None:
    validate(document)
    assert isinstance(client.app, Application)
    served = {
        (route.path.replace(":path}", "}"), method.lower())
        for group in client.app.routes.groups
        for route in group.routes
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert ("/v1/caption", "post") in served
    assert served == {(path, method) for path, operations in document["paths"].items() for method in operations}


def test_the_openapi_document_has_the_three_forms_and_every_option(document) -> None:
    caption = document["paths"]["/v1/caption"]["post"]
    content = caption["requestBody"]["content"]
    images = {"image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp", "image/tiff", "image/avif"}
    images |= {"image/heic", "application/octet-stream"}
    assert set(content) == {*images, "multipart/form-data", "application/json"}
    for kind in ("multipart/form-data", "application/json"):
        assert set(content[kind]["schema"]["properties"]) == {"image", "model", *NAMES}
    assert {p["name"] for p in caption["parameters"] if p["in"] == "query"} == {"model", *NAMES}


def test_the_bounds_of_options_in_the_openapi_document_are_exact(document) -> None:
    """The greatest seed has 64 bits, more than a float holds."""
    by_name = {p["name"]: p["schema"] for p in document["paths"]["/v1/caption"]["post"]["parameters"]}
    members = request_of(document)["content"]["application/json"]["schema"]["properties"]
    assert by_name["seed"]["maximum"] == members["seed"]["maximum"] == 2**64 - 1


def test_the_openapi_document_describes_every_error_in_the_shape_of_its_api(document) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert "X-Request-Id" in {p["name"] for p in operation["parameters"] if p["in"] == "header"}
            assert "500" in operation["responses"]
            for status, response in operation["responses"].items():
                assert response["headers"]["X-Request-Id"]["required"]
                if int(status) >= 400 and path not in ("/readyz", "/health", "/v2/health/ready"):
                    (described,) = response["content"].items()
                    assert described == error_of(path, method)
                    assert ("Retry-After" in response["headers"]) == (status in {"429", "503"})
    chats = ("/v1/chat/completions", "/v1/responses", "/api/generate", "/api/chat")
    for path in ("/v1/caption", "/", "/models/{model}", "/v2/models/{model}/infer", *chats):
        statuses = set(document["paths"][path]["post"]["responses"])
        assert {"400", "408", "413", "415", "422", "429", "500", "503", "504"} < statuses
        assert ("404" in statuses) == (path != "/")


def error_of(path: str, method: str) -> tuple[str, dict[str, Any]]:
    kinds = (
        ("/v1/caption", "Problem"),
        ("/v1/", "OpenAIError"),
        ("/v2", "SentenceError"),
        ("/api/", "SentenceError"),
        ("/models/", "SentenceError"),
    )
    found = next((schema for prefix, schema in kinds if path.startswith(prefix)), "Problem")
    schema = "SentenceError" if (path, method) == ("/", "post") else found
    media_type = "application/problem+json" if schema == "Problem" else "application/json"
    return media_type, {"schema": {"$ref": f"#/components/schemas/{schema}"}}


def test_every_schema_is_used_and_every_reference_leads_somewhere(document) -> None:
    used = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    # A chunk is the data of an event, for which OpenAPI 3.1 has no schema; its description names it.
    assert set(document["components"]["schemas"]) - {"ChatCompletionChunk"} == used


def test_keys_are_described_where_they_are_asked_for(services: Services) -> None:
    app = create_app(services, BodyLimits(1, 1.0), keys=ApiKeys(["secret"]))
    document = TestClient(app).get("/openapi.json").json()
    validate(document)
    scheme = {"type": "http", "scheme": "bearer"}
    assert list(document["components"]["securitySchemes"].values()) == [scheme]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            needs_key = not is_open(method.upper(), path)
            assert ("security" in operation) == ("401" in operation["responses"]) == needs_key


def test_urls_of_images_are_described_where_some_are_fetched(services: Services, document) -> None:
    assert '"format": "uri"' not in json.dumps(request_of(document))
    app = create_app(services, BodyLimits(1, 1.0), HttpSettings(image_hosts=("images.example",)))
    document = TestClient(app).get("/openapi.json").json()
    validate(document)
    assert '"format": "uri"' in json.dumps(request_of(document))


def request_of(document: dict[str, Any]) -> Any:
    return document["paths"]["/v1/chat/completions"]["post"]["requestBody"]


def test_replies_of_other_apis_are_as_described(client: TestClient, image: Png, check) -> None:
    text = base64.b64encode(image()).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}]
    chat = {"model": "fake", "messages": [{"role": "user", "content": parts}]}
    check(client.post("/", content=image()).json(), "HuggingFaceCaptions")
    check(client.post("/", content=b"no").json(), "SentenceError")
    for path in ("/v1/models", "/v1/models/"):
        check(client.get(path).json(), "ModelList")
    check(client.get("/v1/models/fake").json(), "Model")
    check(client.get("/v1/models/other").json(), "OpenAIError")
    check(client.post("/v1/chat/completions", json=chat).json(), "ChatCompletion")
    streamed = {**chat, "stream": True, "stream_options": {"include_usage": True}}
    *events, done = client.post("/v1/chat/completions", json=streamed).text.strip().split("\n\n")
    assert done == "data: [DONE]"
    for event in events:
        check(json.loads(event.removeprefix("data: ")), "ChatCompletionChunk")
    last = json.loads(events[-1].removeprefix("data: "))
    assert (last["backend"], last["timings"]["encode"], last["timings"]["decode"]) == ("eager", 2, 3)
    asked = {"model": "fake", "input": chat["messages"]}
    check(client.post("/v1/responses", json=asked).json(), "ResponseObject")
    for more in ({"text": {"format": {"type": "json_object"}}}, {"tools": [1]}):
        check(client.post("/v1/responses", json={**asked, **more}).json(), "ResponseObject")
    message = {"role": "user", "images": [text]}
    for path, document, schema in (
        ("/api/generate", {"images": [text]}, "OllamaText"),
        ("/api/generate", {}, "OllamaText"),
        ("/api/chat", {"messages": [message]}, "OllamaChat"),
        ("/api/chat", {"messages": []}, "OllamaChat"),
    ):
        check(client.post(path, json={**document, "stream": False}).json(), schema)
        for line in client.post(path, json=document).text.splitlines():
            check(json.loads(line), schema)
    check(client.post("/api/chat", json={"model": "other"}).json(), "SentenceError")
    check(client.get("/api/tags").json(), "OllamaModels")
    check(client.get("/api/ps").json(), "OllamaModels")
    check(client.post("/api/show", json={"model": "fake"}).json(), "OllamaModel")
    check(client.get("/api/version").json(), "OllamaVersion")
    check(client.get("/v2/health/live").json(), "V2Live")
    check(client.get("/v2/health/ready").json(), "V2Ready")
    check(client.get("/v2").json(), "V2Server")
    check(client.get("/v2/models/fake").json(), "V2Model")
    check(client.get("/v2/models/fake/ready").json(), "V2ModelReady")
    check(client.get("/v2/models/other").json(), "SentenceError")
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [text]}
    for options in ({}, {"id": "1", "parameters": {"max_new_tokens": 3}}):
        check(client.post("/v2/models/fake/infer", json={"inputs": [tensor], **options}).json(), "V2Captions")


def test_replies_are_as_described(
    make_services, new_client, client: TestClient, image: Png, document, check
) -> None:
    check(client.post("/v1/caption", content=image()).json(), "Caption")
    check(client.post("/v1/captions", files=[("image", ("a", image())), ("image", ("b", b""))]).json(), "Captions")
    check(client.get("/livez").json(), "Live")
    check(client.get("/readyz").json(), "Ready")
    check(client.get("/startup").json(), "Startup")
    described = document["paths"]["/v1/caption"]["post"]["responses"]
    for bad in (
        client.post("/v1/caption", content=b"x"),
        client.post("/v1/caption?a=b", content=b"x"),
        client.post("/v1/caption", headers={"Content-Type": "text/css"}),
        new_client(make_services()).post("/v1/caption"),
    ):
        check(bad.json(), "Problem")
        assert str(bad.status_code) in described
        for header in described[str(bad.status_code)]["headers"]:
            assert header in bad.headers
