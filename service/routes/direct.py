"""The routes of the hot path: what goes to them goes past FastAPI, which documents them and serves the rest."""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class DirectRoute(APIRoute):
    """Its endpoint takes the request and returns the response. It must not have parameters or dependencies; they
    would be skipped. What it raises is handled by who is around the application."""

    def get_route_handler(self) -> Endpoint:
        endpoint: Endpoint = self.endpoint
        return endpoint


class DirectDispatch:
    """ASGI application: the direct ones of some routes, each under its own path, and `rest` for all else.

    FastAPI's way to an endpoint costs the event loop as much as everything else that it does for a request, and the
    event loop is what limits the captions a second of a fast device."""

    def __init__(self, routes: Iterable[BaseRoute], rest: ASGIApp) -> None:
        """`routes`: in the order in which they match."""
        direct = [route for route in routes if isinstance(route, DirectRoute)]
        self._rest = rest
        self._fixed: dict[tuple[str, str], Endpoint] = {
            (method, route.path): route.endpoint
            for route in direct
            if not route.param_convertors
            for method in route.methods or ()
        }
        self._patterns = [route for route in direct if route.param_convertors]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoint(scope)
        if endpoint is None:
            await self._rest(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

    def _endpoint(self, scope: Scope) -> Endpoint | None:
        # Under a prefix of a server's the paths are not those of the routes; websockets have no method.
        if scope.get("root_path") or scope["type"] != "http":
            return None
        endpoint = self._fixed.get((scope["method"], scope["path"]))
        if endpoint is not None:
            return endpoint
        for route in self._patterns:
            match, child = route.matches(scope)
            if match is Match.FULL:
                scope.update(child)
                return route.endpoint
        return None
