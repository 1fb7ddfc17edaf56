"""Renders any exception as the error document of the API that was asked.

For snapcap's own API that is a problem of RFC 9457,

    {"type": "urn:snapcap:problem:prompt_too_long", "title": "Prompt too long", "status": 422,
     "detail": "…what to do…", "instance": "/v1/caption", "error": "…the same sentence…",
     "code": "prompt_too_long", "request_id": "…"}

or, elsewhere, the same sentence as

    Hugging Face, v2   {"error": "…what to do…"}
    OpenAI             {"error": {"message": "…what to do…", "type": …, "param": …, "code": …}}

A problem's `error` is what the hub's clients show. Further members belong to one code: `option`, `reason`, `phase`.
What the error is, its status and its headers come from `errors.py`.
"""

import json
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from snapcap.models.dataclass import dataclass
from snapcap.service.errors import EngineFailed, ServiceError


def as_service_error(error: Exception) -> ServiceError:
    """Returns the error that a client may see. An unknown exception becomes the fixed sentence of EngineFailed."""
    return error if isinstance(error, ServiceError) else EngineFailed()


def forget_frames(error: BaseException) -> None:
    """Of an error that has been handled, let go of the frames that it came through, and of the image in them.

    A future that has the error is in one of these frames: such a circle stays until the garbage collector runs."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


def problem(error: ServiceError, instance: str, request_id: str) -> dict[str, Any]:
    """The members of the problem. `instance` is the path of the request."""
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
    """`schema` names it in the OpenAPI document; `body` makes it of the error, the request's path and its id."""

    schema: str
    media_type: str
    body: Callable[[ServiceError, str, str], dict[str, Any]]

    def response(self, error: ServiceError, path: str, request_id: str) -> Response:
        """The reply, with the headers of the error (Retry-After, Allow, …)."""
        content = json.dumps(self.body(error, path, request_id)).encode()
        return Response(content, error.status, error.headers(), self.media_type)


def openai_error(error: ServiceError) -> dict[str, Any]:
    """The body of an error, which is also what an error in the middle of a stream looks like."""
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


def _sentence(error: ServiceError, _path: str, _request_id: str) -> dict[str, Any]:
    return {"error": error.detail}


PROBLEM = ErrorShape("Problem", "application/problem+json", problem)
HUGGING_FACE = ErrorShape("HuggingFaceError", "application/json", _sentence)
OPENAI = ErrorShape("OpenAIError", "application/json", lambda error, _path, _request_id: openai_error(error))
V2 = ErrorShape("V2Error", "application/json", _sentence)
