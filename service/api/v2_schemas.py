"""Describes the Open Inference Protocol v2 in the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from snapcap.service import errors
from snapcap.service.api.caption import MAX_IMAGES
from snapcap.service.api.schema_parts import (
    BINARY,
    EXAMPLE_IMAGE,
    IMAGE_TEXT,
    MODEL_NAME,
    NAMED,
    ClosedReply,
    ModelState,
    Omittable,
    Operation,
    caption_reply,
    json_body,
    nullable,
    path_parameter,
    ready_replies,
    reply,
    request_object,
)
from snapcap.service.api.v2 import BINARY_OUTPUT, BYTES, HEADER_LENGTH, INPUT, MAX_TIMEOUT, OUTPUT
from snapcap.service.captioning import options as caption_options

_LENGTH = {
    "name": HEADER_LENGTH,
    "in": "header",
    "schema": {"type": "integer", "minimum": 0},
    "description": "Length of the JSON in bytes, if binary tensor data follows it in the body.",
}


def operations() -> dict[str, Operation]:
    """Returns the operation of each route by its name."""
    return {
        "server_live": Operation("Tell whether the process is alive", reply("The process is alive", "V2Live")),
        "server_ready": Operation("Tell whether the server captions images", ready_replies("V2Ready")),
        "server_metadata": Operation("Describe the server", reply("Name, version and extensions", "V2Server")),
        **_of_model("", "", [MODEL_NAME]),
        **_of_model(
            "versioned_",
            " of a version",
            [MODEL_NAME, path_parameter("version", "The model's version, which is 1.")],
        ),
    }


def _of_model(prefix: str, what: str, parameters: list[dict[str, Any]]) -> dict[str, Operation]:
    captions = caption_reply("The captions, in order", "V2Captions", {BYTES: BINARY})
    described = (errors.ModelNotFound, errors.NotReady)
    return {
        f"{prefix}model_infer": Operation(
            f"Caption a batch of images{what}",
            captions,
            (*NAMED, errors.TooManyImages),
            _body(),
            [*parameters, _LENGTH],
        ),
        f"{prefix}model_ready": Operation(
            f"Tell whether the model{what} is ready",
            reply("The model is ready", "V2ModelReady"),
            described,
            parameters=parameters,
        ),
        f"{prefix}model_metadata": Operation(
            f"Describe the tensors of the model{what}",
            reply("The metadata", "V2Model"),
            described,
            parameters=parameters,
        ),
    }


def _body() -> dict[str, Any]:
    options = {name: nullable(option) for name, option in caption_options.schema().items()}
    options["timeout"] = {
        "type": ["integer", "null"],
        "minimum": 0,
        "maximum": MAX_TIMEOUT,
        "description": "Time limit of this request in microseconds; 0: none. The server's own limit applies too.",
    }
    parameters = request_object([], **options, **{BINARY_OUTPUT: {"type": "boolean"}})
    row = {"type": "array", "items": IMAGE_TEXT, "minItems": 1}
    tensor = request_object(
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
        parameters=nullable(request_object([])),
        data={"type": "array", "items": {"anyOf": [IMAGE_TEXT, row]}, "minItems": 1},
    )
    output = request_object(
        ["name"], name={"const": OUTPUT}, parameters=nullable(request_object([], binary_data={"type": "boolean"}))
    )
    request = request_object(
        ["inputs"],
        id={
            "type": ["string", "null"],
            "maxLength": 1000,
            "description": "Printable text. The reply has the same id.",
        },
        parameters=nullable(parameters),
        inputs={"type": "array", "items": tensor, "minItems": 1, "maxItems": 1},
        outputs={"type": ["array", "null"], "items": output, "maxItems": 1},
    )
    binary = {
        **BINARY,
        "description": "The JSON, then the binary tensor data. The input has the parameter `binary_data_size`, the "
        "size of the data in bytes, in place of `data`. Each image follows its length in 4 bytes, little-endian.",
    }
    example = {"inputs": [{"name": INPUT, "datatype": "BYTES", "shape": [1], "data": [EXAMPLE_IMAGE]}]}
    return {**json_body(request, example), BYTES: {"schema": binary}}


class V2Live(ClosedReply):
    live: Literal[True]


class V2Ready(ClosedReply):
    ready: bool


class V2ServedModel(ClosedReply):
    name: str
    state: ModelState


class V2Server(ClosedReply):
    name: Literal["snapcap"]
    version: str
    extensions: list[str]
    models: Omittable[list[V2ServedModel]] = Field(
        description="The models, if the server has several or has one that may leave."
    )


class V2ModelReady(ClosedReply):
    name: str
    ready: Literal[True]


class V2TensorMetadata(ClosedReply):
    name: str
    datatype: Literal["BYTES"]
    shape: list[int]


class V2Model(ClosedReply):
    name: str
    versions: list[str]
    platform: str
    inputs: list[V2TensorMetadata]
    outputs: list[V2TensorMetadata]


class V2OutputParameters(ClosedReply):
    binary_data_size: int = Field(ge=0)


class V2Output(ClosedReply):
    name: Literal["caption"]
    datatype: Literal["BYTES"]
    shape: list[int]
    data: list[str] = Field(
        default=[], description="The captions. Empty if the captions follow as binary tensor data."
    )
    parameters: V2OutputParameters | None = None


class V2Captions(ClosedReply):
    model_name: str
    model_version: Literal["1"]
    outputs: list[V2Output] = Field(min_length=1, max_length=1)
    id: str = Field(default="", description="The id of the request, if the request had one.")


ROOTS: tuple[type[BaseModel], ...] = (V2Live, V2Ready, V2Server, V2ModelReady, V2Model, V2Captions)
