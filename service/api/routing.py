"""Finds the API that a request belongs to, and calls the endpoints of captions directly.

FastAPI documents those routes and serves the rest.
"""

import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from snapcap.service.api.problems import OPENAI, PROBLEM, V2, ErrorShape


@dataclass(frozen=True)
class Api:
    """`label` in metrics; `captions`: its requests are counted as in flight, and logged when they succeed too."""

    label: str
    shape: ErrorShape = PROBLEM
    captions: bool = False


# Paths that do not exist have the errors of the API whose client would ask for them.
_NEIGHBOURS = (
    ("/v1/caption", Api("other")),
    ("/v1/", Api("other", OPENAI)),
    ("/v2/", Api("other", V2)),
    ("", Api("other")),
)


class Apis:
    """From method and path to the API, before the request is routed."""

    def __init__(self) -> None:
        self._fixed: dict[str, dict[str, Api]] = {}
        self._patterns: list[tuple[re.Pattern[str], frozenset[str], Api]] = []

    def add(self, router: Router, api: Api | None = None) -> None:
        """The routes of a router belong to an API; None: each has its own label, as in "/livez" is "livez"."""
        for route in router.routes:
            if isinstance(route, Route):
                self._add(route, api or Api(route.path.strip("/") or "page"))

    def of(self, method: str, path: str) -> Api:
        """The API of a path, whatever is there; of several, the one that has the method."""
        methods = self._fixed.get(path)
        if methods is not None:
            return methods.get(method) or next(iter(methods.values()))
        for pattern, _, api in self._patterns:
            if pattern.match(path):
                return api
        return next(api for prefix, api in _NEIGHBOURS if path.startswith(prefix))

    def methods(self, path: str) -> list[str]:
        """The methods that a path answers, of those that the table has."""
        found = set(self._fixed.get(path, ()))
        matching = [(pattern, methods) for pattern, methods, _ in self._patterns if pattern.match(path)]
        if matching and not found:
            # The first that matches is the one that is meant: others take its last words for the name of a model.
            found = {each for pattern, methods in matching if pattern == matching[0][0] for each in methods}
        # FastAPI's routes for GET do not know that RequestScope answers HEAD as well.
        return sorted(found | ({"HEAD"} if "GET" in found else set()))

    def _add(self, route: Route, api: Api) -> None:
        if route.param_convertors:
            self._patterns.append((route.path_regex, frozenset(route.methods or ()), api))
            return
        methods: Mapping[str, Api] = dict.fromkeys(route.methods or (), api)
        self._fixed.setdefault(route.path, {}).update(methods)


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
