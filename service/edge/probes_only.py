"""Answers nothing but probes on connections beyond the limit, until there is room again."""

from typing import Any

from uvicorn._types import ASGI3Application

from snapcap.service.api.middleware.request_id import identify
from snapcap.service.api.problems import PROBLEM
from snapcap.service.edge.connection_errors import TooManyConnections
from snapcap.service.edge.connections import Connections

_PROBES = frozenset({"/livez", "/readyz", "/startup", "/metrics", "/v2/health/live", "/v2/health/ready"})


class ProbesOnly:
    """ASGI application of a connection beyond the limit, until there is room again."""

    def __init__(self, app: ASGI3Application, watch: Connections) -> None:
        self._app = app
        self._watch = watch

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        probes = scope["path"] in _PROBES and scope["method"] in ("GET", "HEAD")
        if probes or not self._watch.crowded:
            await self._app(scope, receive, send)
            return
        self._watch.count("max_connections")
        response = PROBLEM.response(TooManyConnections(), scope["path"], identify(scope))
        response.headers["connection"] = "close"
        await response(scope, receive, send)
