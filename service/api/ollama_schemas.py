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
    OptionalRegions,
    caption_reply,
    json_request,
    nullable,
    problems,
    reply,
    request_object,
    streamed_reply,
)
from snapcap.service.captioning import options as caption_options
from snapcap.service.captioning.options import EMPTY
from snapcap.service.http.problems import SENTENCE
from snapcap.service.http.replies import LineStream

_MODEL = {"type": ["string", "null"], "description": "The name of the served model, with or without `:latest`."}
_IMAGES = {"type": ["array", "null"], "items": IMAGE_TEXT}
_TEXT = {"type": ["string", "null"]}


def operations() -> dict[str, dict[str, Any]]:
    """Returns FastAPI's keyword arguments for each route, by the name of the route."""
    state = problems(errors.NotReady, shape=SENTENCE)
    shown = problems(*JSON_BODY, *BODY, errors.InvalidOption, errors.ModelNotFound, errors.NotReady, shape=SENTENCE)
    example = {"model": EXAMPLE_MODEL, "stream": False}
    prompt = {"prompt": _TEXT, "images": _IMAGES, "system": _TEXT}
    # A prompt is for an image; a request with neither loads or unloads the model.
    pictured = {"required": ["images"], "properties": {"images": {"type": "array", "minItems": 1}}}
    silent = {"properties": {"prompt": {"enum": ["", None]}}}
    chat = {"messages": [{"role": USER, "content": "", "images": [EXAMPLE_IMAGE]}]}
    return {
        "generate": {
            "summary": "Caption an image",
            "responses": _answer("OllamaText"),
            "openapi_extra": _body(prompt, {**example, "images": [EXAMPLE_IMAGE]}, anyOf=[pictured, silent]),
        },
        "chat": {
            "summary": "Caption the image of a message",
            "responses": _answer("OllamaChat"),
            "openapi_extra": _body({"messages": _messages()}, {**example, **chat}),
        },
        "tags": {"summary": "List the models", "responses": reply("The served model", "OllamaModels") | state},
        "ps": {"summary": "List the loaded models", "responses": reply("The model", "OllamaModels") | state},
        "show": {
            "summary": "Describe a model",
            "responses": reply("The model", "OllamaModel") | shown,
            "openapi_extra": json_request(
                request_object(["model"], model={"type": "string", "minLength": 1}), {"model": EXAMPLE_MODEL}
            ),
        },
        "version": {"summary": "Tell the version of the API", "responses": reply("The version", "OllamaVersion")},
    }


def _answer(schema: str) -> dict[int | str, dict[str, Any]]:
    whole = caption_reply("The caption whole, or as JSON lines unless stream is false", schema)
    lines = f"Lines of {schema}, the last with `done`. An error after the first line is a line with `error`."
    return streamed_reply(whole, LineStream, lines) | problems(*NAMED, shape=SENTENCE)


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
    return json_request({**request_object([], **members), **rules}, example)


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
