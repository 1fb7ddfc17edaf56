"""What a client may know of any exception, and that as a problem of RFC 9457.

    {"type": "urn:snapcap:problem:prompt_too_long", "title": "Prompt too long", "status": 422,
     "detail": "…what to do…", "instance": "/v1/caption", "error": "…the same sentence…",
     "code": "prompt_too_long", "request_id": "…"}

`error` is what the hub's clients show. Further members belong to one code: `option`, `reason`, `phase`.
"""

from typing import Any

from starlette.exceptions import HTTPException

from snapcap.service.errors import BadRequest, ClientDisconnected, EngineFailed, NotFound, ServiceError


def as_service_error(error: Exception, path: str) -> ServiceError:
    """What a client may know of any exception; an unknown one becomes the fixed sentence of EngineFailed."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, HTTPException):
        return _from_router(error, path)
    return EngineFailed()


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


def _from_router(error: HTTPException, path: str) -> ServiceError:
    if error.status_code == 404:
        return NotFound(f"There is nothing at {path[:200]}; GET /openapi.json lists what there is.")
    if error.status_code == 499:
        return ClientDisconnected()
    return BadRequest(str(error.detail)) if 400 <= error.status_code < 500 else EngineFailed()
