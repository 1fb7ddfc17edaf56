"""Serves the Open Inference Protocol v2: health, metadata and inference.

An inference request is a batch of images in one tensor of BYTES. In JSON an element is base64 text. With the binary
tensor data extension the raw elements follow the JSON in the body, each after its length. tritonclient uses the
extension by default.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from snapcap.models.dataclass import dataclass
from snapcap.service.api.answers import switch
from snapcap.service.api.caption import MAX_IMAGES
from snapcap.service.captioning.captioner import Captioner
from snapcap.service.captioning.options import NAMES, CaptionOptions, integer, options_from_json, sort_fields
from snapcap.service.engine.admission import Permit
from snapcap.service.errors import (
    BadRequest,
    InvalidJson,
    InvalidOption,
    MissingImage,
    NotFound,
    NotReady,
    PayloadTooLarge,
    TooManyImages,
    UnsupportedOption,
)
from snapcap.service.http.bodies import BodyLimits, image_from_base64, json_object, member_object, read_json
from snapcap.service.http.middleware import new_caption, note_state
from snapcap.service.http.problems import SENTENCE
from snapcap.service.http.replies import JsonReply, ignored_header, unless_disconnected
from snapcap.service.http.routing import Api, RouteGroup, nothing_at
from snapcap.service.limits import BINARY_HEADER_BYTES
from snapcap.service.readiness import Readiness
from snapcap.warmup.version import snapcap_version

VERSION = "1"
_TAG = "Open Inference Protocol"
HEADER_LENGTH = "Inference-Header-Content-Length"
_VERBS = re.compile(r"/(infer|ready|versions/[^/]*(/(infer|ready))?)$")
# Triton's extensions of the protocol, which snapcap does not serve. Their paths begin with the path of the model.
_EXTENSIONS = ("config", "stats", "generate", "generate_stream", "trace/setting", "load", "unload")
INPUT = "image"
OUTPUT = "caption"
BINARY_OUTPUT = "binary_data_output"
BYTES = "application/octet-stream"  # the media type of a body or reply with binary tensor data
# In this API `timeout` is in microseconds, and 0 is none, as in Triton.
MAX_TIMEOUT = 3_600_000_000
PARAMETERS = (*NAMES, BINARY_OUTPUT)
_MEMBERS = ("id", "parameters", "inputs", "outputs")
# Triton's tensor parameters that move the data elsewhere or return other data, each with the values without effect.
_TENSOR_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"shared_memory_region": (), "classification": (0,)}
_EXAMPLE = '{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["…base64…"]}]}'
_LENGTH_BYTES = 4


@dataclass(frozen=True)
class InferRequest:
    """Holds a parsed request. `shape`: shape of the input and of the output. `binary`: the output follows the JSON
    as binary tensor data."""

    id: str | None
    images: tuple[bytes, ...]
    shape: tuple[int, ...]
    options: CaptionOptions
    binary: bool


class V2Route(Route):
    """Matches a model name that contains slashes, but not one that ends with a verb of the protocol, such as
    /infer."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **keywords: Any) -> None:
        super().__init__(path, endpoint, **keywords)
        # The extensions are excluded in the pattern: `Dispatch` uses the pattern too, and must find no method for
        # their paths.
        elsewhere = "".join(f"(?<!/{each})" for each in _EXTENSIONS)
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + elsewhere + "$")

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is not Match.NONE and _VERBS.search(child["path_params"].get("model", "")):
            return Match.NONE, {}
        return match, child


def _models() -> tuple[tuple[str, str], ...]:
    """Returns how the names of a model's routes begin, each with the path of the model."""
    path = "/v2/models/{model:path}"
    return ("versioned_", f"{path}/versions/{{version}}"), ("", path)


class V2Routes:
    """Serves the endpoints of the protocol for one captioner."""

    def __init__(self, captioner: Captioner, readiness: Readiness, limits: BodyLimits) -> None:
        self._captioner = captioner
        self._readiness = readiness
        self._limits = limits

    def probes(self) -> RouteGroup:
        """Returns the routes of the health of the server and of its models, to add before those of `group`."""
        routes = [
            Route("/v2/health/live", self.live, name="server_live"),
            Route("/v2/health/ready", self.ready, name="server_ready"),
        ]
        for name, path in _models():
            routes.append(V2Route(f"{path}/ready", self.model_ready, name=f"{name}model_ready"))
        return RouteGroup(_TAG, routes, Api("v2_health", SENTENCE))

    def group(self) -> RouteGroup:
        """Returns the routes of metadata and inference."""
        routes = [V2Route("/v2", self.server, name="server_metadata")]
        for name, path in _models():
            routes += [
                V2Route(f"{path}/infer", self.infer, name=f"{name}model_infer", methods=["POST"]),
                V2Route(path, self.model, name=f"{name}model_metadata"),
            ]
        return RouteGroup(_TAG, routes, Api("v2", SENTENCE, captions=True))

    async def live(self, request: Request) -> Response:
        """Answers 200 as long as the event loop runs. The answer depends on nothing else."""
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        """Answers 200 when the server captions images, else 503."""
        note_state(request.scope, self._readiness.state.value, self._readiness.phase())
        return JSONResponse({"ready": self._readiness.servable}, 200 if self._readiness.servable else 503)

    async def server(self, request: Request) -> Response:
        """Returns the name and version of the server, and the extensions of the protocol that it supports. A server
        of several models lists them with their states."""
        body = {"name": "snapcap", "version": snapcap_version(), "extensions": ["binary_tensor_data"]}
        models = [{"name": name, "state": each.state} for name, each in self._captioner.models.items()]
        return JSONResponse({**body, "models": models} if models else body)

    async def model(self, request: Request) -> Response:
        """Describes the tensors of the model. The name may contain slashes."""
        tensors = {"datatype": "BYTES", "shape": [-1]}
        body = {
            "name": self._captioner_of(request).model_name,
            "versions": [VERSION],
            "platform": "snapcap",
            "inputs": [{"name": INPUT, **tensors}],
            "outputs": [{"name": OUTPUT, **tensors}],
        }
        return JSONResponse(body)

    async def model_ready(self, request: Request) -> Response:
        """Answers 200 when the model captions images, or wakes at a request that names it, else 503."""
        captioner = self._captioner_of(request)
        if not self._readiness.servable:
            raise NotReady(self._readiness.phase())
        if captioner.keeper is not None:
            captioner.keeper.check()
        return JSONResponse({"name": captioner.model_name, "ready": True})

    async def infer(self, request: Request) -> Response:
        """Captions a batch of up to 16 images in one tensor. If one image fails, the whole request fails. An
        element is base64 in JSON, and the bytes of the image file in binary tensor data."""
        captioner = self._captioner_of(request)
        with captioner.admit() as permit:
            length = request.headers.get(HEADER_LENGTH)
            wanted = await read_json(request, self._limits, lambda body: parse_infer(body, length))
            permit.take(len(wanted.images))
            work = self._captions(request, captioner, wanted, permit)
            captions = await unless_disconnected(request.receive, work)
        return _reply(str(captioner.model_name), wanted, captions)

    async def _captions(
        self, request: Request, captioner: Captioner, wanted: InferRequest, permit: Permit
    ) -> list[str]:
        jobs = [new_caption(request.scope, permit, index) for index in range(len(wanted.images))]
        tasks = [
            asyncio.ensure_future(captioner.caption(image, wanted.options, job))
            for image, job in zip(wanted.images, jobs, strict=True)
        ]
        try:
            return [result.caption for result in await asyncio.gather(*tasks)]
        finally:
            for task in tasks:  # after one failure the request fails, so the other captions are not needed
                task.cancel()
            await asyncio.wait(tasks)  # until they end they use the queue places of the permit

    def _captioner_of(self, request: Request) -> Captioner:
        """Returns the captioner of the model in the path. Raises NotReady, ModelNotFound, NotFound."""
        asked = request.path_params["model"]
        served = self._captioner.models or (self._captioner.model_name,)
        if asked not in served and any(asked.startswith(f"{each}/") for each in served if each is not None):
            raise nothing_at(request.scope["path"])
        captioner = self._captioner.served(asked)
        version = request.path_params.get("version", VERSION)
        if version != VERSION:
            name = captioner.model_name
            raise NotFound(f"The model {name!r} has no version {version[:50]!r}; use version {VERSION}.")
        return captioner


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
    reply = Response(head + data, headers={HEADER_LENGTH: str(len(head))}, media_type=BYTES)
    reply.raw_headers.extend(headers)
    return reply


def parse_infer(body: bytes, header_length: str | None) -> InferRequest:
    """Returns the parsed request. `header_length`: the value of Inference-Header-Content-Length, the length of the
    JSON before binary data; None: without the header, the whole body is JSON. Raises BadRequest."""
    size = len(body) if header_length is None else _header_length(header_length, len(body))
    if size < len(body) and size > BINARY_HEADER_BYTES:
        raise PayloadTooLarge(f"The JSON before binary tensor data may have at most {BINARY_HEADER_BYTES} bytes.")
    fields = sort_fields(json_object(body[:size], _EXAMPLE).items(), _MEMBERS, within="parameters")
    document = dict(fields.known)
    within = sort_fields(member_object(document.get("parameters"), "parameters").items(), PARAMETERS, PARAMETERS)
    parameters = dict(within.known)
    tensor = _single(document.get("inputs"), "inputs", INPUT)
    if tensor.get("datatype") != "BYTES":
        raise UnsupportedOption("inputs[0].datatype", "an image is an element of BYTES")
    shape = _shape(tensor.get("shape"))
    return InferRequest(
        id=_identity(document.get("id")),
        images=_images(tensor, shape, memoryview(body)[size:]),
        shape=shape,
        options=_options(parameters).ignoring(*fields.ignored, *within.ignored),
        binary=_binary_output(document.get("outputs"), parameters),
    )


def bytes_elements(elements: Iterable[bytes]) -> bytes:
    """Returns BYTES elements as binary tensor data: each after its length in 4 bytes, little-endian."""
    return b"".join(len(each).to_bytes(_LENGTH_BYTES, "little") + each for each in elements)


def _header_length(text: str, body: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text) <= body):
        raise BadRequest("Inference-Header-Content-Length must be the number of bytes of the JSON in the body.")
    return int(text)


def _shape(value: Any) -> tuple[int, ...]:
    shape = [integer(each) for each in value] if isinstance(value, list) else []
    # Clients send [n], or [n, 1] for a batch of n rows with one element each.
    if not shape or shape[0] is None or shape[0] < 1 or shape[1:] not in ([], [1]):
        raise InvalidOption("inputs[0].shape", "be [n] or [n, 1], for n images")
    if shape[0] > MAX_IMAGES:
        raise TooManyImages(f"The request has {shape[0]} images; send at most {MAX_IMAGES} in one request.")
    return (shape[0], *(1 for _ in shape[1:]))


def _images(tensor: Mapping[str, Any], shape: tuple[int, ...], binary: memoryview) -> tuple[bytes, ...]:
    parameters = _tensor_parameters(tensor, "inputs", "binary_data_size")
    size = parameters.get("binary_data_size")
    if size is None:
        if binary:
            raise InvalidOption("inputs[0].parameters.binary_data_size", "say how many bytes follow the JSON")
        elements = _flat(tensor.get("data"))
    else:
        if tensor.get("data") is not None or integer(size) != len(binary):
            raise InvalidOption("inputs[0].parameters.binary_data_size", f"be {len(binary)}, the size of the data")
        elements = _elements(binary, prod(shape))
    if len(elements) != prod(shape):
        raise InvalidOption("inputs[0].shape", "have as many elements as there are images")
    if size is not None:
        return tuple(elements)
    return tuple(image_from_base64(each, f"inputs[0].data[{index}]") for index, each in enumerate(elements))


def _flat(data: Any) -> list[Any]:
    """Returns the elements of a JSON tensor. The data may be a flat list, or nested lists in the tensor's shape."""
    if not isinstance(data, list) or not data:
        raise MissingImage("The member inputs[0].data must be a list of images in base64.")
    return [each for row in data for each in (row if isinstance(row, list) else [row])]


def _elements(binary: memoryview, wanted: int) -> list[bytes]:
    """Splits binary tensor data into elements, at most one more than wanted."""
    images: list[bytes] = []
    at = 0
    while at < len(binary) and len(images) <= wanted:
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(binary[at:start], "little")
        images.append(bytes(binary[start:at]))
    if at > len(binary):
        raise InvalidJson("The binary tensor data ends within an element: send each behind its length in 4 bytes.")
    return images


def _options(parameters: Mapping[str, Any]) -> CaptionOptions:
    values = {name: value for name, value in parameters.items() if name in NAMES}
    if "timeout" in values:
        timeout = integer(values["timeout"])
        if timeout is None or not 0 <= timeout <= MAX_TIMEOUT:
            raise InvalidOption("timeout", f"be a whole number of microseconds from 0 to {MAX_TIMEOUT}")
        values["timeout"] = timeout / 1e6 or None
    return options_from_json(values, CaptionOptions())


def _binary_output(outputs: Any, parameters: Mapping[str, Any]) -> bool:
    everywhere = switch(parameters, BINARY_OUTPUT)
    if outputs in (None, []):
        return everywhere
    output = _single(outputs, "outputs", OUTPUT)
    return switch(_tensor_parameters(output, "outputs", "binary_data"), "binary_data", default=everywhere)


def _tensor_parameters(tensor: Mapping[str, Any], where: str, name: str) -> dict[str, Any]:
    """Returns the parameter `name` of a tensor, in a dict that is empty without it. Refuses or ignores the
    others."""
    given = member_object(tensor.get("parameters"), f"{where}[0].parameters")
    return dict(sort_fields(given.items(), (name,), (name,), neutral=_TENSOR_NEUTRAL).known)


def _single(value: Any, where: str, name: str) -> Mapping[str, Any]:
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], dict):
        raise InvalidOption(where, f"be a list of one tensor, named {name!r}")
    if value[0].get("name") != name:
        raise InvalidOption(f"{where}[0].name", f"be {name!r}")
    return value[0]


def _identity(value: Any) -> str | None:
    if value is None:
        return None
    # The reply repeats the id, and UTF-8 cannot encode half of a surrogate pair, which is not printable.
    if not isinstance(value, str) or len(value) > 1000 or not value.isprintable():
        raise InvalidOption("id", "be at most 1000 printable characters")
    return value
