"""The exception handler of the application: counts the error, logs what is our fault, and renders the problem."""

import logging

from fastapi import Request, Response

from service.errors import EngineFailed
from service.metrics import Metrics
from service.problem import as_service_error, problem_response
from service.request_id import request_id

_logger = logging.getLogger("snapcap.access")


class ProblemHandler:
    """Any exception in, problem+json out."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def __call__(self, request: Request, error: Exception) -> Response:
        identity, path = request_id(request.scope), request.scope["path"]
        failure = as_service_error(error, request.method, path)
        self._metrics.count_rejection(failure)
        if isinstance(failure, EngineFailed):
            _logger.error("request failed", exc_info=error, extra={"fields": {"request_id": identity}})
        return problem_response(failure, path, identity)
