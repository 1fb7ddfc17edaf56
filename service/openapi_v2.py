"""The OpenAPI document of the Open Inference Protocol v2."""

from dataclasses import dataclass
from typing import Any

from service import caption_options, errors
from service.error_shapes import V2
from service.openapi import BODY, CAPTION, JSON_BODY, path_parameter, problems, reply
from service.v2_request import BINARY_OUTPUT, INPUT, MAX_IMAGES, OUTPUT

_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "schema": {"type": "integer", "minimum": 0},
    "description": "The bytes of the JSON, when binary tensor data follows it in the body.",
}


@dataclass(frozen=True)
class ModelDocuments:
    """Keywords of the three routes of a model."""

    infer: dict[str, Any]
    ready: dict[str, Any]
    metadata: dict[str, Any]


def of_model(versioned: bool) -> ModelDocuments:
    """With or without the version in the path."""
    parameters = [path_parameter("model", "The model's name.")]
    if versioned:
        parameters.append(path_parameter("version", "The model's version: 1."))
    what = " of a version" if versioned else ""
    model = (errors.ModelNotFound, errors.NotReady)
    return ModelDocuments(
        infer={
            "summary": f"Caption a batch of images{what}",
            "responses": _infer_reply()
            | problems(
                *JSON_BODY,
                *BODY,
                *CAPTION,
                errors.TooManyImages,
                errors.UnsupportedOption,
                errors.ModelNotFound,
                shape=V2,
            ),
            "openapi_extra": {"parameters": [*parameters, _LENGTH], "requestBody": _body()},
        },
        ready={
            "summary": f"Whether the model{what} is ready",
            "responses": reply("It is", "V2ModelReady") | problems(*model, shape=V2),
            "openapi_extra": {"parameters": parameters},
        },
        metadata={
            "summary": f"The tensors of the model{what}",
            "responses": reply("The metadata", "V2Model") | problems(*model, shape=V2),
            "openapi_extra": {"parameters": parameters},
        },
    )


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


def _body() -> dict[str, Any]:
    options = {
        name: {**schema, "type": [schema["type"], "null"]} for name, schema in caption_options.schema().items()
    }
    options["timeout"] |= {"type": ["integer", "null"], "maximum": 3_600_000_000, "description": "Microseconds."}
    parameters = _object([], **options, **{BINARY_OUTPUT: {"type": "boolean"}})
    element = {"type": "string", "minLength": 1, "description": "Base64, or a data URI with base64."}
    row = {"type": "array", "items": element}
    tensor = _object(
        ["name", "datatype", "shape"],
        name={"const": INPUT},
        datatype={"const": "BYTES"},
        shape={
            "type": "array",
            "prefixItems": [{"type": "integer", "minimum": 1, "maximum": MAX_IMAGES}, {"const": 1}],
            "items": False,
            "minItems": 1,
            "description": "[n] or [n, 1], for n images.",
        },
        parameters=_optional(_object([], binary_data_size={"type": ["integer", "null"], "minimum": 0})),
        data={"type": "array", "items": {"anyOf": [element, row]}, "minItems": 1},
    )
    output = _object(
        ["name"], name={"const": OUTPUT}, parameters=_optional(_object([], binary_data={"type": "boolean"}))
    )
    request = _object(
        ["inputs"],
        id={"type": ["string", "null"], "maxLength": 1000, "description": "Comes back in the reply."},
        parameters=_optional(parameters),
        inputs={"type": "array", "items": tensor, "minItems": 1, "maxItems": 1},
        outputs={"type": ["array", "null"], "items": output, "maxItems": 1},
    )
    binary = {"type": "string", "format": "binary", "description": "The JSON, and then the binary tensor data."}
    content = {"application/json": {"schema": request}, "application/octet-stream": {"schema": binary}}
    return {"required": True, "content": content}


def _optional(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "type": ["object", "null"]}


def _infer_reply() -> dict[int | str, dict[str, Any]]:
    captions = reply("The captions, in order", "V2Captions")
    captions[200]["content"]["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    return captions


LIVE: dict[str, Any] = {
    "summary": "Whether the process is alive",
    "responses": reply("It is", "V2Live"),
}
READY: dict[str, Any] = {
    "summary": "Whether captions are served",
    "responses": reply("They are", "V2Ready") | {503: {**reply("Not yet, or no longer", "V2Ready")[200]}},
}
SERVER: dict[str, Any] = {
    "summary": "What the server is",
    "responses": reply("Name, version and extensions", "V2Server"),
}
