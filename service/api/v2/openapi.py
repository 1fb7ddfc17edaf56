"""Describes the Open Inference Protocol v2 in the OpenAPI document."""

from typing import Any

from snapcap.service import errors
from snapcap.service.api.openapi.schema_parts import (
    BODY,
    CAPTION,
    EXAMPLE_IMAGE,
    IMAGE_TEXT,
    JSON_BODY,
    caption_reply,
    nullable,
    path_parameter,
    problems,
    reply,
    request_object,
)
from snapcap.service.api.problems import V2
from snapcap.service.api.v2.request import BINARY_OUTPUT, INPUT, MAX_IMAGES, MAX_TIMEOUT, OUTPUT
from snapcap.service.captioning import options as caption_options

_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "schema": {"type": "integer", "minimum": 0},
    "description": "The bytes of the JSON, when binary tensor data follows it in the body.",
}


def operations() -> dict[str, dict[str, Any]]:
    """Returns FastAPI's keyword arguments for each route, by the name of the route."""
    return {
        "server_live": {"summary": "Whether the process is alive", "responses": reply("It is", "V2Live")},
        "server_ready": {
            "summary": "Whether captions are served",
            "responses": reply("They are", "V2Ready") | reply("Not yet, or no longer", "V2Ready", status=503),
        },
        "server_metadata": {
            "summary": "What the server is",
            "responses": reply("Name, version and extensions", "V2Server"),
        },
        **_of_model("versioned_", versioned=True),
        **_of_model("", versioned=False),
    }


def _of_model(prefix: str, *, versioned: bool) -> dict[str, dict[str, Any]]:
    parameters = [path_parameter("model", "The model's name.")]
    if versioned:
        parameters.append(path_parameter("version", "The model's version, which is 1."))
    what = " of a version" if versioned else ""
    model = (errors.ModelNotFound, errors.NotReady)
    return {
        f"{prefix}model_infer": {
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
        f"{prefix}model_ready": {
            "summary": f"Whether the model{what} is ready",
            "responses": reply("It is", "V2ModelReady") | problems(*model, shape=V2),
            "openapi_extra": {"parameters": parameters},
        },
        f"{prefix}model_metadata": {
            "summary": f"The tensors of the model{what}",
            "responses": reply("The metadata", "V2Model") | problems(*model, shape=V2),
            "openapi_extra": {"parameters": parameters},
        },
    }


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return request_object(required, properties)


def _body() -> dict[str, Any]:
    options = {name: nullable(option) for name, option in caption_options.schema().items()}
    options["timeout"] = {
        "type": ["integer", "null"],
        "minimum": 1,
        "maximum": MAX_TIMEOUT,
        "description": "Microseconds that this request may take at most; the server's own limit holds too.",
    }
    parameters = _object([], **options, **{BINARY_OUTPUT: {"type": "boolean"}})
    row = {"type": "array", "items": IMAGE_TEXT, "minItems": 1}
    tensor = _object(
        ["name", "datatype", "shape", "data"],
        name={"const": INPUT},
        datatype={"const": "BYTES"},
        shape={
            "type": "array",
            "prefixItems": [{"type": "integer", "minimum": 1, "maximum": MAX_IMAGES}, {"const": 1}],
            "items": False,
            "minItems": 1,
            "description": "[n] or [n, 1], for n images.",
        },
        parameters=nullable(_object([])),
        data={"type": "array", "items": {"anyOf": [IMAGE_TEXT, row]}, "minItems": 1},
    )
    output = _object(
        ["name"], name={"const": OUTPUT}, parameters=nullable(_object([], binary_data={"type": "boolean"}))
    )
    request = _object(
        ["inputs"],
        id={"type": ["string", "null"], "maxLength": 1000, "description": "Printable; comes back in the reply."},
        parameters=nullable(parameters),
        inputs={"type": "array", "items": tensor, "minItems": 1, "maxItems": 1},
        outputs={"type": ["array", "null"], "items": output, "maxItems": 1},
    )
    binary = {
        "type": "string",
        "format": "binary",
        "description": "The JSON, whose input has the parameter binary_data_size in place of data, and then as "
        "many bytes: each image behind its length in 4 bytes, the lowest first.",
    }
    example = {"inputs": [{"name": INPUT, "datatype": "BYTES", "shape": [1], "data": [EXAMPLE_IMAGE]}]}
    content = {
        "application/json": {"schema": request, "example": example},
        "application/octet-stream": {"schema": binary},
    }
    return {"required": True, "content": content}


def _infer_reply() -> dict[int | str, dict[str, Any]]:
    captions = caption_reply("The captions, in order", "V2Captions")
    captions[200]["content"]["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    return captions
