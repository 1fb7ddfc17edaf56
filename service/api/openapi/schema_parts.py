"""Builds the parts of which each API describes its operations: responses, errors, schemas of bodies."""

from typing import Any

from snapcap.models.processing.image_formats import MEDIA_TYPES
from snapcap.service import errors
from snapcap.service.api.bodies.replies import IGNORED
from snapcap.service.api.problems import PROBLEM, ErrorShape
from snapcap.service.errors import ServiceError

Schema = dict[str, Any]
# As `responses=` of FastAPI takes them.
Responses = dict[int | str, dict[str, Any]]

# Of a body that is read under limits, and of a caption that is waited for.
BODY: tuple[type[ServiceError], ...] = (
    errors.InvalidEncoding,
    errors.BodyTimeout,
    errors.PayloadTooLarge,
    errors.UnsupportedMediaType,
)
CAPTION: tuple[type[ServiceError], ...] = (
    errors.UnknownOption,
    errors.InvalidOption,
    errors.MissingImage,
    errors.UnprocessableImage,
    errors.PromptTooLong,
    errors.Overloaded,
    errors.NotReady,
    errors.DeadlineExceeded,
)
JSON_BODY: tuple[type[ServiceError], ...] = (errors.EmptyBody, errors.InvalidJson)
_IGNORED = (
    "Names what of the request has no part in the caption: unknown fields, and in a chat `text` of users, `system` "
    "messages, `replies`, earlier `images`. Absent where there is nothing of it. A field that would change the "
    "caption, or has nearly the name of an option, is refused."
)
_BINARY: Schema = {"type": "string", "format": "binary"}
# The image as the body itself, in the formats that are read.
IMAGE_BODIES: dict[str, Any] = {
    media_type: {"schema": _BINARY} for media_type in (*MEDIA_TYPES, "application/octet-stream")
}
IMAGE_TEXT: Schema = {
    "type": "string",
    "minLength": 1,
    "format": "byte",
    "contentEncoding": "base64",
    "description": "Base64, or a data URI with base64.",
}
# A small blue square: what stands for an image in examples, which can be sent as they are.
EXAMPLE_IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAGklEQVR42mPUj7/A"
    "QApgYiARjGoY1TB0NAAAYM8Bfov0xWUAAAAASUVORK5CYII="
)
EXAMPLE_MODEL = "demo"


def problems(*kinds: type[ServiceError], shape: ErrorShape = PROBLEM) -> Responses:
    """The responses of these errors, one for each status."""
    by_status: dict[int, list[type[ServiceError]]] = {}
    for kind in kinds:
        by_status.setdefault(kind.status, []).append(kind)
    return {status: _problem(status, of_status, shape) for status, of_status in sorted(by_status.items())}


def reply(description: str, *schemas: str, status: int = 200) -> Responses:
    """The response with a schema of the components, or with any of several."""
    refs = [ref(schema) for schema in schemas]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {status: {"description": description, "content": {"application/json": {"schema": schema}}}}


def caption_reply(description: str, schema: str) -> Responses:
    """The response to a request whose unknown fields are ignored, and named."""
    whole = reply(description, schema)
    whole[200]["headers"] = {IGNORED: {"schema": {"type": "string"}, "description": _IGNORED}}
    return whole


def ref(schema: str) -> Schema:
    """A schema of the components."""
    return {"$ref": f"#/components/schemas/{schema}"}


def nullable(schema: Schema) -> Schema:
    """The schema, or null, which is as good as leaving it out."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}


def request_object(required: list[str], properties: dict[str, Any]) -> Schema:
    """An object of a request: other members than these are ignored."""
    return {"type": "object", "required": required, "properties": properties}


def form_object(required: list[str], properties: dict[str, Any]) -> Schema:
    """The parts of a form: others than these are ignored, if they are text."""
    return {**request_object(required, properties), "additionalProperties": {"type": "string"}}


def path_parameter(name: str, description: str) -> dict[str, Any]:
    """A parameter in the path, for a route that reads it by itself."""
    return {
        "name": name,
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "description": description,
    }


def _problem(status: int, kinds: list[type[ServiceError]], shape: ErrorShape) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": ", ".join(kind.title for kind in kinds),
        "content": {shape.media_type: {"schema": ref(shape.schema)}},
    }
    if status in (429, 503):
        retry = {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds", "required": True}
        response["headers"] = {"Retry-After": retry}
    if status == 401:
        response["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}, "required": True}}
    return response
