"""The OpenAPI document of the Hugging Face API."""

from typing import Any

from service import caption_options, errors
from service.error_shapes import HUGGING_FACE
from service.huggingface_request import NESTED
from service.openapi import BODY, CAPTION, JSON_BODY, path_parameter, problems, reply

_BINARY = {"type": "string", "format": "binary"}
_ERRORS = (*JSON_BODY, *BODY, *CAPTION, errors.UnsupportedOption)


def _body() -> dict[str, Any]:
    parameters: dict[str, Any] = {
        name: {**schema, "type": [schema["type"], "null"]} for name, schema in caption_options.schema().items()
    }
    parameters["max_new_tokens"]["description"] += " More than the model holds means as many as it holds."
    parameters["do_sample"] = {
        "type": ["boolean", "null"],
        "description": "false: greedy, whatever the temperature; true: the temperature is 1 unless it is given.",
    }
    parameters["num_beams"] = {"enum": [1, None], "description": "There is no beam search."}
    level = {"type": ["object", "null"], "additionalProperties": False, "properties": parameters}
    nested = {
        name: {**level, "description": "Parameters of generation; they count as if they stood outside."}
        for name in NESTED
    }
    document = {
        "type": "object",
        "required": ["inputs"],
        "additionalProperties": False,
        "properties": {
            "inputs": {"type": "string", "minLength": 1, "description": "Base64, or a data URI with base64."},
            "parameters": {**level, "properties": {**parameters, **nested}},
        },
    }
    content = {
        "image/*": {"schema": _BINARY},
        "application/octet-stream": {"schema": _BINARY},
        "application/json": {"schema": document},
    }
    return {"requestBody": {"required": True, "content": content}}


INFER: dict[str, Any] = {
    "summary": "Caption an image",
    "responses": reply("The caption", "HuggingFaceCaptions") | problems(*_ERRORS, shape=HUGGING_FACE),
    "openapi_extra": _body(),
}
INFER_MODEL: dict[str, Any] = {
    "summary": "Caption an image with a model",
    "responses": reply("The caption", "HuggingFaceCaptions")
    | problems(*_ERRORS, errors.ModelNotFound, shape=HUGGING_FACE),
    "openapi_extra": {"parameters": [path_parameter("model", "The model's name.")], **_body()},
}
