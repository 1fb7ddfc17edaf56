"""Defines the parts that the APIs share in the OpenAPI document: operations, replies, errors, schemas of bodies.

Only the document and the tests use the models. The routes build the replies without them, and no reply is
validated while serving.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from snapcap.service import errors
from snapcap.service.errors import ServiceError
from snapcap.service.http.replies import IGNORED, EventStream

Schema = dict[str, Any]
# The replies of an operation by their status.
Replies = dict[int, dict[str, Any]]
# BODY: errors of reading a body under limits. CAPTION: errors of a caption request. URLS: errors of an image's URL.
# NAMED: errors of a caption request as JSON that names the model and may have options that are not served.
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
URLS: tuple[type[ServiceError], ...] = (errors.ImageUrlRefused, errors.ImageNotFetched)
JSON_BODY: tuple[type[ServiceError], ...] = (errors.EmptyBody, errors.InvalidJson)
NAMED: tuple[type[ServiceError], ...] = (
    *JSON_BODY,
    *BODY,
    *CAPTION,
    errors.UnsupportedOption,
    errors.ModelNotFound,
)
_IGNORED = (
    "Names the ignored parts of the request: unknown fields, and in a chat `text` of users, `system` messages, "
    "`replies`, earlier `images`. Absent if nothing was ignored. The server refuses a field that would change the "
    "caption, or whose name is almost that of an option."
)
BINARY: Schema = {"type": "string", "format": "binary"}
IMAGE_TEXT: Schema = {
    "type": "string",
    "minLength": 1,
    "format": "byte",
    "contentEncoding": "base64",
    "description": "Base64, or a data URI with base64.",
}
# A small blue square. Examples contain a real image, so that they can be sent unchanged.
EXAMPLE_IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAGklEQVR42mPUj7/A"
    "QApgYiARjGoY1TB0NAAAYM8Bfov0xWUAAAAASUVORK5CYII="
)
EXAMPLE_MODEL = "demo"


class Operation(NamedTuple):
    """Describes the operation of a route. `replies`: the replies without an error. `errors`: the errors of this
    operation, beside those of any request. `body`: the schemas and examples of the request's body by media type.
    `parameters`: of the path, the query and the head."""

    summary: str
    replies: Replies
    errors: Sequence[type[ServiceError]] = ()
    body: Mapping[str, Any] | None = None
    parameters: Sequence[Mapping[str, Any]] = ()


def reply(description: str, schema: str) -> Replies:
    """Returns the reply with a schema of the document's components."""
    return {200: {"description": description, "content": {"application/json": {"schema": ref(schema)}}}}


def ready_replies(schema: str) -> Replies:
    """Returns the replies that tell whether the server captions images."""
    unready = reply("The server is starting, is ending, or failed to start", schema)[200]
    return {**reply("The server captions images", schema), 503: unready}


def caption_reply(description: str, schema: str, others: Mapping[str, Schema] | None = None) -> Replies:
    """Returns the reply to a caption request, with the header that names ignored fields. `others`: the schemas of
    other media types."""
    whole = reply(description, schema)
    whole[200]["headers"] = {IGNORED: {"schema": {"type": "string"}, "description": _IGNORED}}
    whole[200]["content"] |= {media_type: {"schema": other} for media_type, other in (others or {}).items()}
    return whole


def streamed_reply(description: str, schema: str, stream: type[EventStream], events: str) -> Replies:
    """Returns the reply to a caption request, or the stream that a client may have in its place. `events`:
    describes the stream, without a type: some tools check each event, and others the whole text."""
    return caption_reply(description, schema, {stream.media_type: {"description": events}})


def ref(schema: str) -> Schema:
    """Returns a reference to a schema of the document's components."""
    return {"$ref": f"#/components/schemas/{schema}"}


def nullable(schema: Schema) -> Schema:
    """Returns the schema with null as a further value: null has the effect of leaving the member out."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}


def request_object(required: list[str], **properties: Any) -> Schema:
    """Returns the schema of an object in a request. Other members are allowed, and ignored."""
    return {"type": "object", "required": required, "properties": properties}


def form_object(required: list[str], **properties: Any) -> Schema:
    """Returns the schema of a form. Other parts are allowed if they are text, and ignored."""
    return {**request_object(required, **properties), "additionalProperties": {"type": "string"}}


def json_body(schema: Schema, example: Any) -> dict[str, Any]:
    """Returns the body of a request that is a JSON document."""
    return {"application/json": {"schema": schema, "example": example}}


def path_parameter(name: str, description: str) -> dict[str, Any]:
    """Returns a parameter in the path."""
    return {
        "name": name,
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "description": description,
    }


MODEL_NAME = path_parameter("model", "The model's name.")


def one_of(schema: dict[str, Any]) -> None:
    """Changes the schema of a list: each item matches exactly one of the models, not any number of them."""
    schema["items"]["oneOf"] = schema["items"].pop("anyOf")


def without_default(schema: dict[str, Any]) -> None:
    """Removes the default from the schema of a member that may be absent but is never null."""
    schema.pop("default", None)


Item = TypeVar("Item")
# The type of a member that may be absent but is never null.
Omittable = Annotated[Item | SkipJsonSchema[None], Field(default=None, json_schema_extra=without_default)]


class Region(BaseModel):
    """A part of the image that the text names, in pixels of the image that was sent, turned upright by its EXIF
    orientation."""

    label: str
    box: tuple[int, int, int, int] = Field(description="Left, top, right and bottom.")
    polygons: Omittable[list[list[int]]] = Field(
        description="Outlines, as x and y of each corner in turn. Absent if the part is the box."
    )


OptionalRegions = Annotated[
    Omittable[list[Region]],
    Field(description="The parts of the image that the text names. Absent unless the task's answer names parts."),
]
ModelState = Literal["absent", "waking", "ready", "leaving"]


class ClosedReply(BaseModel):
    """An object with these members and no others."""

    model_config = ConfigDict(extra="forbid")


class Problem(BaseModel):
    """A problem of RFC 9457. Further members belong to certain codes only."""

    type: str = Field(json_schema_extra={"format": "uri"}, description="`urn:snapcap:problem:` and the code.")
    title: str
    status: int = Field(ge=400, le=599)
    detail: str = Field(description="The error and what to do, as text.")
    instance: str = Field(description="The path of the request.")
    error: str = Field(description="The same text as `detail`.")
    code: str
    request_id: str
    option: Omittable[str] = Field(description="The name of the invalid option.")
    reason: Omittable[str] = Field(description="The reason for which the image cannot be processed.")
    phase: Omittable[str] = Field(description="The current phase of the server, while it does not caption images.")
    limit: Omittable[int] = Field(description="The largest size of a body, in bytes.")


class SentenceError(ClosedReply):
    error: str = Field(description="The error and what to do, as text.")


ROOTS: tuple[type[BaseModel], ...] = (Problem, SentenceError)
