"""JSON schemas of the replies, for the OpenAPI document and for the tests that hold the replies to them."""

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_STATES: Schema = {"type": "string", "enum": ["starting", "ready", "draining", "failed"]}


def components() -> dict[str, Schema]:
    """Every named schema."""
    return {
        "Caption": _caption(),
        "CaptionItem": _item("Caption"),
        "ProblemItem": _item("Problem"),
        "Captions": _captions(),
        "Problem": _problem(),
        "Live": _object({"status": {"const": "live"}}),
        "Ready": _ready(),
        "Startup": _startup(),
    }


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: dict[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _caption() -> Schema:
    timings = {
        "queue": {**_NUMBER, "description": "waiting, for a decode thread and for the device"},
        "decode_image": {**_NUMBER, "description": "decoding and resizing the image"},
        "encode": {**_NUMBER, "description": "the encoder batch"},
        "decode": {**_NUMBER, "description": "all decode steps"},
        "total": {**_NUMBER, "description": "from the end of the body to the reply"},
    }
    return _object(
        {
            "caption": {**_TEXT, "description": "The caption; it begins with the prompt."},
            "model": _TEXT,
            "tokens": {"type": "integer", "minimum": 0, "description": "Tokens generated."},
            "finish_reason": {
                "type": "string",
                "enum": ["stop", "length"],
                "description": "stop: the model ended it; length: the limit of new tokens was reached.",
            },
            "backend": _TEXT,
            "timings": {**_object(timings), "description": "Milliseconds."},
        }
    )


def _item(name: str) -> Schema:
    position = _object({"index": {"type": "integer", "minimum": 0}, "filename": _TEXT})
    return {"allOf": [position, reference(name)]}


def _captions() -> Schema:
    either = {"oneOf": [reference("CaptionItem"), reference("ProblemItem")]}
    return _object({"captions": {"type": "array", "items": either, "minItems": 1, "maxItems": 16}})


def _problem() -> Schema:
    optional: dict[str, Schema] = {
        "option": {**_TEXT, "description": "the option that is wrong"},
        "reason": {**_TEXT, "description": "why the image cannot be processed"},
        "phase": {**_TEXT, "description": "what the server is doing instead of serving"},
    }
    required: dict[str, Schema] = {
        "type": {"type": "string", "format": "uri", "description": "urn:snapcap:problem: and the code"},
        "title": _TEXT,
        "status": {"type": "integer", "minimum": 400, "maximum": 599},
        "detail": {**_TEXT, "description": "A sentence that says what to do."},
        "instance": {**_TEXT, "description": "The path of the request."},
        "error": {**_TEXT, "description": "The same sentence as detail."},
        "code": _TEXT,
        "request_id": _TEXT,
    }
    return _object(required | optional, tuple(optional))


def _ready() -> Schema:
    error = {**_TEXT, "description": "why the start failed"}
    return _object({"state": _STATES, "phase": _TEXT, "error": error}, ("error",))


def _startup() -> Schema:
    phase = _object({"name": _TEXT, "start": _NUMBER, "end": {"type": ["number", "null"]}})
    bucket = _object(
        {
            "component": {"type": "string", "enum": ["encoder", "decoder"]},
            "size": {"type": "integer", "minimum": 1},
            "state": {"type": "string", "enum": ["pending", "eager", "warm", "captured", "failed"]},
            "backend": _TEXT,
            "seconds": {"type": ["number", "null"]},
        }
    )
    nullable: Schema = {"type": ["string", "null"]}
    return _object(
        {
            "state": _STATES,
            "phase": _TEXT,
            "now": {**_NUMBER, "description": "Seconds since the process was executed, as all times here."},
            "marks": {
                "type": "object",
                "description": "The moments live, ready and first_caption, once they have come.",
                "additionalProperties": _NUMBER,
            },
            "phases": {"type": "array", "items": phase},
            "backend": nullable,
            "device": nullable,
            "dtype": nullable,
            "error": nullable,
            "buckets": {"type": "array", "items": bucket},
        }
    )
