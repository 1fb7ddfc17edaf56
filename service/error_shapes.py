"""How each API spells an error. What the error is, its status and its headers come from `errors.py`.

caption, probes   {"type": …, "title": …, "status": 422, "detail": "…what to do…", "error": "…", …}  problem.py
Hugging Face      {"error": "…what to do…"}
OpenAI            {"error": {"message": "…what to do…", "type": …, "param": …, "code": …}}
v2                {"error": "…what to do…"}
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from snapcap.service.errors import ServiceError
from snapcap.service.problem import problem


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
