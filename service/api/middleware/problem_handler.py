"""Handles the exceptions of the application: counts them, logs internal errors, and renders the error response.

`RequestScope` passes it the exceptions of requests. The OpenAI API passes it the exceptions that end a
stream after its first byte.
"""

import logging

from starlette.requests import Request
from starlette.responses import Response

from snapcap.service.api.middleware.request_id import request_id
from snapcap.service.api.middleware.request_log import note_refusal
from snapcap.service.api.problems import as_service_error
from snapcap.service.api.routing import Apis
from snapcap.service.errors import EngineFailed, ServiceError
from snapcap.service.telemetry.metrics import Metrics

_logger = logging.getLogger("snapcap.access")


class ProblemHandler:
    """Turns any exception into an error response in the shape of the request's API."""

    def __init__(self, metrics: Metrics, apis: Apis) -> None:
        self._metrics = metrics
        self.apis = apis

    async def __call__(self, request: Request, error: Exception) -> Response:
        """Notes the error and returns the error response."""
        failure = self.note(request, error)
        path = request.scope["path"]
        return self.apis.of(request.method, path).shape.response(failure, path, request_id(request.scope))

    def note(self, request: Request, error: Exception) -> ServiceError:
        """Counts the error, logs it if it is internal, and returns the error that the client may see."""
        failure = as_service_error(error)
        self._metrics.count_rejection(failure)
        note_refusal(request.scope, failure)
        if isinstance(failure, EngineFailed):
            identity = request_id(request.scope)
            _logger.error("request failed", exc_info=error, extra={"fields": {"request_id": identity}})
        return failure
