"""Handles the exceptions of the application: counts them, logs what is our fault, lets the API spell them.

`RequestScope` has one for what a request raises, and the OpenAI API for what ends a stream that has begun.
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
    """Any exception in, the error of the request's API out."""

    def __init__(self, metrics: Metrics, apis: Apis) -> None:
        self._metrics = metrics
        self.apis = apis

    async def __call__(self, request: Request, error: Exception) -> Response:
        """The reply."""
        failure = self.note(request, error)
        path = request.scope["path"]
        return self.apis.of(request.method, path).shape.response(failure, path, request_id(request.scope))

    def note(self, request: Request, error: Exception) -> ServiceError:
        """Count it, log it if it is our fault, and say what the client may know."""
        failure = as_service_error(error)
        self._metrics.count_rejection(failure)
        note_refusal(request.scope, failure)
        if isinstance(failure, EngineFailed):
            identity = request_id(request.scope)
            _logger.error("request failed", exc_info=error, extra={"fields": {"request_id": identity}})
        return failure
