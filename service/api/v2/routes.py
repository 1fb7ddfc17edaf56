"""Answers the Open Inference Protocol v2: health, metadata and inference."""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from snapcap.service.api.bodies.body import BodyLimits
from snapcap.service.api.bodies.disconnect import unless_disconnected
from snapcap.service.api.bodies.json_body import read_json
from snapcap.service.api.bodies.replies import JsonReply, ignored_header
from snapcap.service.api.middleware.request_id import request_id
from snapcap.service.api.middleware.request_log import new_caption, note_state
from snapcap.service.api.problems import V2
from snapcap.service.api.routing import Api, RouteGroup, nothing_at
from snapcap.service.api.v2.request import INPUT, OUTPUT, InferRequest, bytes_elements, parse_infer
from snapcap.service.captioning.captioner import Captioner
from snapcap.service.engine.admission import Permit
from snapcap.service.errors import NotFound, NotReady
from snapcap.service.memory import body_account
from snapcap.service.readiness import Readiness
from snapcap.warmup.version import snapcap_version

VERSION = "1"
_TAG = "Open Inference Protocol"
HEADER_LENGTH = "Inference-Header-Content-Length"
_VERBS = re.compile(r"/(infer|ready|versions/[^/]*(/(infer|ready))?)$")
# Triton's extensions of the protocol, which snapcap does not serve. Their paths begin with the path of the model.
_EXTENSIONS = ("config", "stats", "generate", "generate_stream", "trace/setting", "load", "unload")


class V2Route(Route):
    """Matches a model name that contains slashes, but not one that ends with a verb of the protocol, such as
    /infer."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **keywords: Any) -> None:
        super().__init__(path, endpoint, **keywords)
        # The extensions are excluded in the pattern: `Apis` uses the pattern too, and must find no method for their
        # paths.
        elsewhere = "".join(f"(?<!/{each})" for each in _EXTENSIONS)
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + elsewhere + "$")

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is not Match.NONE and _VERBS.search(child["path_params"].get("model", "")):
            return Match.NONE, {}
        return match, child


class V2Routes:
    """Serves the endpoints of the protocol for one captioner."""

    def __init__(self, captioner: Captioner, readiness: Readiness, limits: BodyLimits) -> None:
        self._captioner = captioner
        self._readiness = readiness
        self._limits = limits

    def probes(self) -> RouteGroup:
        """Returns the routes of the server's health."""
        routes = [
            Route("/v2/health/live", self.live, name="server_live"),
            Route("/v2/health/ready", self.ready, name="server_ready"),
        ]
        return RouteGroup(_TAG, routes, Api("v2_health", V2))

    def group(self) -> RouteGroup:
        """Returns the routes of metadata and inference."""
        routes = [V2Route("/v2", self.server, name="server_metadata")]
        for name, version in (("versioned_", "/versions/{version}"), ("", "")):
            path = f"/v2/models/{{model:path}}{version}"
            routes += [
                V2Route(f"{path}/infer", self.infer, name=f"{name}model_infer", methods=["POST"]),
                V2Route(f"{path}/ready", self.model_ready, name=f"{name}model_ready"),
                V2Route(path, self.model, name=f"{name}model_metadata"),
            ]
        return RouteGroup(_TAG, routes, Api("v2", V2, captions=True))

    async def live(self, request: Request) -> Response:
        """200 as long as the event loop runs; depends on nothing else."""
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        """200 when captions are served, else 503."""
        note_state(request.scope, self._readiness.state.value, self._readiness.phase())
        return JSONResponse({"ready": self._readiness.servable}, 200 if self._readiness.servable else 503)

    async def server(self, request: Request) -> Response:
        """What the server is, and the extensions of the protocol that it has."""
        return JSONResponse({"name": "snapcap", "version": snapcap_version(), "extensions": ["binary_tensor_data"]})

    async def model(self, request: Request) -> Response:
        """The tensors of the model. Its name may hold slashes."""
        tensors = {"datatype": "BYTES", "shape": [-1]}
        body = {
            "name": self._model(request),
            "versions": [VERSION],
            "platform": "snapcap",
            "inputs": [{"name": INPUT, **tensors}],
            "outputs": [{"name": OUTPUT, **tensors}],
        }
        return JSONResponse(body)

    async def model_ready(self, request: Request) -> Response:
        """200 when the model serves, else 503."""
        name = self._model(request)
        if not self._readiness.servable:
            raise NotReady(self._readiness.phase())
        return JSONResponse({"name": name, "ready": True})

    async def infer(self, request: Request) -> Response:
        """A batch of up to 16 images in one tensor; it fails as a whole. Elements of JSON are base64; those of
        binary tensor data are the bytes of the image files."""
        name = self._model(request)
        with self._captioner.admit() as permit:
            length = request.headers.get(HEADER_LENGTH)
            wanted = await read_json(
                request, self._limits, self._captioner.pool, lambda body: parse_infer(body, length)
            )
            permit.take(len(wanted.images))
            captions = await unless_disconnected(request.receive, self._captions(request, wanted, permit))
        return _reply(name, wanted, captions)

    async def _captions(self, request: Request, wanted: InferRequest, permit: Permit) -> list[str]:
        identity, account = request_id(request.scope), body_account(request.scope)
        tasks = [
            asyncio.ensure_future(
                self._captioner.caption(
                    image, wanted.options, f"{identity}/{index}", permit, account, new_caption(request.scope)
                )
            )
            for index, image in enumerate(wanted.images)
        ]
        try:
            return [result.caption for result in await asyncio.gather(*tasks)]
        finally:
            for task in tasks:  # after one failure the request fails, so the other captions are not needed
                task.cancel()
            await asyncio.wait(tasks)  # until they end they use the queue places of the permit

    def _model(self, request: Request) -> str:
        """Returns the name of the model in the path. Raises NotReady, ModelNotFound, NotFound."""
        asked, served = request.path_params["model"], self._captioner.model_name
        if served is not None and asked.startswith(f"{served}/"):
            raise nothing_at(request.scope["path"])
        name, _ = self._captioner.served_model(asked)
        version = request.path_params.get("version", VERSION)
        if version != VERSION:
            raise NotFound(f"The model {name!r} has no version {version[:50]!r}; use version {VERSION}.")
        return name


def _reply(name: str, wanted: InferRequest, captions: list[str]) -> Response:
    output: dict[str, Any] = {"name": OUTPUT, "datatype": "BYTES", "shape": list(wanted.shape)}
    body: dict[str, Any] = {"model_name": name, "model_version": VERSION, "outputs": [output]}
    if wanted.id is not None:
        body["id"] = wanted.id
    headers = ignored_header(wanted.options.ignored)
    if not wanted.binary:
        output["data"] = captions
        return JsonReply(body, headers)
    data = bytes_elements(caption.encode() for caption in captions)
    output["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps(body).encode()
    reply = Response(head + data, headers={HEADER_LENGTH: str(len(head))}, media_type="application/octet-stream")
    reply.raw_headers.extend(headers)
    return reply
