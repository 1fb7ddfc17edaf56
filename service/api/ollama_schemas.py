"""Describes Ollama's API in the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from snapcap.models.text import USER
from snapcap.service import errors
from snapcap.service.api.conversation import OTHER_ROLES
from snapcap.service.api.ollama import OPTIONS
from snapcap.service.api.openai_schemas import STOP, SWITCH, OptionalTexts, unserved
from snapcap.service.api.schema_parts import (
    BODY,
    EXAMPLE_IMAGE,
    EXAMPLE_MODEL,
    IMAGE_TEXT,
    JSON_BODY,
    NAMED,
    ClosedReply,
    Omittable,
    Operation,
    OptionalRegions,
    Replies,
    json_body,
    nullable,
    reply,
    request_object,
    streamed_reply,
)
from snapcap.service.captioning import options as caption_options
from snapcap.service.captioning.options import EMPTY
from snapcap.service.http.replies import LineStream

_MODEL = {"type": ["string", "null"], "description": "The name of the served model, with or without `:latest`."}
_IMAGES = {"type": ["array", "null"], "items": IMAGE_TEXT}
_TEXT = {"type": ["string", "null"]}


def operations() -> dict[str, Operation]:
    """Returns the operation of each route by its name."""
    shown = (*JSON_BODY, *BODY, errors.InvalidOption, errors.ModelNotFound, errors.NotReady)
    example = {"model": EXAMPLE_MODEL, "stream": False}
    prompt = {"prompt": _TEXT, "images": _IMAGES, "system": _TEXT}
    # A prompt is for an image; a request with neither loads or unloads the model.
    pictured = {"required": ["images"], "properties": {"images": {"type": "array", "minItems": 1}}}
    silent = {"properties": {"prompt": {"enum": ["", None]}}}
    chat = {"messages": [{"role": USER, "content": "", "images": [EXAMPLE_IMAGE]}]}
    named = request_object(["model"], model={"type": "string", "minLength": 1})
    return {
        "generate": Operation(
            "Caption an image",
            _answer("OllamaText"),
            NAMED,
            _body(prompt, {**example, "images": [EXAMPLE_IMAGE]}, anyOf=[pictured, silent]),
        ),
        "chat": Operation(
            "Caption the image of a message",
            _answer("OllamaChat"),
            NAMED,
            _body({"messages": _messages()}, {**example, **chat}),
        ),
        "tags": Operation("List the models", reply("The served model", "OllamaModels"), [errors.NotReady]),
        "ps": Operation("List the loaded models", reply("The model", "OllamaModels"), [errors.NotReady]),
        "show": Operation(
            "Describe a model",
            reply("The model", "OllamaModel"),
            shown,
            json_body(named, {"model": EXAMPLE_MODEL}),
        ),
        "version": Operation("Tell the version of the API", reply("The version", "OllamaVersion")),
    }


def _answer(schema: str) -> Replies:
    lines = f"Lines of {schema}, the last with `done`. An error after the first line is a line with `error`."
    return streamed_reply("The caption whole, or as JSON lines unless stream is false", schema, LineStream, lines)


def _messages() -> dict[str, Any]:
    message = request_object(["role"], role={"enum": [USER, *OTHER_ROLES]}, content=_TEXT, images=_IMAGES)
    with_image = request_object(["images"], images={"type": "array", "minItems": 1})
    items = {"type": "array", "items": message}
    return {"anyOf": [{**items, "contains": with_image}, {"type": ["array", "null"], "maxItems": 0}]}


def _body(own: dict[str, Any], example: dict[str, Any], **rules: Any) -> dict[str, Any]:
    schemas = caption_options.schema()
    options = {field: nullable(schemas[name]) for field, name in OPTIONS.items()}
    options["num_predict"] = {
        **options["num_predict"],
        "anyOf": [*options["num_predict"]["anyOf"], {"enum": [0, -2]}],
    }
    members = {
        "model": _MODEL,
        **own,
        "stream": {**SWITCH, "default": True},
        "options": nullable(request_object([], **options, stop=STOP)),
        "keep_alive": {
            "type": ["number", "string", "null"],
            "pattern": r"^-?([0-9]{1,12}(\.[0-9]{0,9})?(ns|us|µs|ms|s|m|h)){1,7}$|^-?[0-9]{1,12}$|^$",
            "description": "Seconds, or a duration such as `5m`, for which the model stays loaded without a "
            "request. Below 0: for ever. No effect on a server whose models never leave.",
        },
        "format": {
            "anyOf": [{"enum": ["json", *EMPTY, None]}, {"type": "object"}],
            "description": "`json`: the answer is an object with the member `caption`. A schema must be that of an "
            "object with one required member of type string.",
        },
        **unserved({"think": (False,)}),
    }
    return json_body({**request_object([], **members), **rules}, example)


class OllamaLine(ClosedReply):
    """A line of a stream, or a whole reply. Counts and durations in nanoseconds come with `done`."""

    model: str
    created_at: str
    done: bool
    done_reason: Omittable[str] = Field(description="stop, length, or of a request without an image: load, unload.")
    total_duration: Omittable[int]
    load_duration: Omittable[int]
    prompt_eval_count: Omittable[int]
    prompt_eval_duration: Omittable[int] = Field(description="Reading and encoding the image.")
    eval_count: Omittable[int]
    eval_duration: Omittable[int]
    regions: OptionalRegions
    warnings: OptionalTexts = Field(description="Says what the server ignored, or read in another place.")


class OllamaText(OllamaLine):
    response: str


class OllamaMessage(ClosedReply):
    role: Literal["assistant"]
    content: str


class OllamaChat(OllamaLine):
    message: OllamaMessage


class OllamaListed(ClosedReply):
    name: str
    model: str
    size: int = Field(ge=0, description="Bytes of the files with the weights; 0 if this machine has none.")
    digest: str = Field(description="SHA-256 of the names, sizes and times of these files; zeros without them.")
    details: dict[str, str | list[str]]
    modified_at: Omittable[str]
    expires_at: Omittable[str]
    size_vram: Omittable[int]


class OllamaModels(ClosedReply):
    models: list[OllamaListed]


class OllamaModel(ClosedReply):
    license: str
    modelfile: str
    parameters: str
    template: str
    details: dict[str, str | list[str]]
    model_info: dict[str, str]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(ClosedReply):
    version: str


ROOTS: tuple[type[BaseModel], ...] = (OllamaText, OllamaChat, OllamaModels, OllamaModel, OllamaVersion)
