"""Renders any exception as an error document, in the shape of the API that the request was for.

snapcap's own API answers with a problem of RFC 9457:

    {"type": "urn:snapcap:problem:prompt_too_long", "title": "Prompt too long", "status": 422,
     "detail": "…what to do…", "instance": "/v1/caption", "error": "…the same sentence…",
     "code": "prompt_too_long", "request_id": "…"}

The other APIs answer with the same sentence as

    Ollama, Hugging Face, v2   {"error": "…what to do…"}
    OpenAI                     {"error": {"message": "…what to do…", "type": …, "param": …, "code": …}}

Clients of the Hugging Face hub show the member `error` of a problem. The members `option`, `reason` and `phase`
occur with certain codes only. `errors.py` defines the errors, with their status and headers.
"""

import json
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from snapcap.models.dataclass import dataclass
from snapcap.service.errors import EngineFailed, ServiceError


def as_service_error(error: Exception) -> ServiceError:
    """Returns the error that a client may see: any exception but a ServiceError becomes EngineFailed, whose message
    is fixed."""
    return error if isinstance(error, ServiceError) else EngineFailed()


def forget_frames(error: BaseException) -> None:
    """Drops the tracebacks of a handled error and of its causes. Their frames hold the image in memory.

    A future in one of the frames holds the error. Only the garbage collector frees such a cycle."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


def problem(error: ServiceError, instance: str, request_id: str) -> dict[str, Any]:
    """Returns the members of the problem. `instance`: the path of the request."""
    return {
        "type": f"urn:snapcap:problem:{error.code}",
        "title": error.title,
        "status": error.status,
        "detail": error.detail,
        "instance": instance,
        "error": error.detail,
        "code": error.code,
        "request_id": request_id,
        **error.extras,
    }


@dataclass(frozen=True)
class ErrorShape:
    """Describes an API's error document. `schema`: its name in the OpenAPI document. `body`: returns the document
    for an error, the path of the request, and the id of the request."""

    schema: str
    media_type: str
    body: Callable[[ServiceError, str, str], dict[str, Any]]

    def response(self, error: ServiceError, path: str, request_id: str) -> Response:
        """Returns the response, with the headers of the error (Retry-After, Allow, …)."""
        content = json.dumps(self.body(error, path, request_id)).encode()
        return Response(content, error.status, error.headers(), self.media_type)


def openai_error(error: ServiceError) -> dict[str, Any]:
    """Returns the error document of the OpenAI API. A stream that fails sends the same document as an event."""
    members = {
        "message": error.detail,
        "type": _openai_type(error.status),
        "param": error.extras.get("option"),
        "code": error.code,
    }
    return {"error": members}


def _openai_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"


PROBLEM = ErrorShape("Problem", "application/problem+json", problem)
# Hugging Face, Ollama and v2 share this shape.
SENTENCE = ErrorShape("SentenceError", "application/json", lambda error, _path, _identity: {"error": error.detail})
OPENAI = ErrorShape("OpenAIError", "application/json", lambda error, _path, _identity: openai_error(error))
