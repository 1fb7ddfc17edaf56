"""Finds the endpoint of a request, and the API whose way of spelling errors it has."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from starlette.requests import Request
from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send

from snapcap.models.dataclass import dataclass
from snapcap.service.api.problems import OPENAI, PROBLEM, V2, ErrorShape
from snapcap.service.errors import MethodNotAllowed, NotFound, NotReady, QueryTooLong

# A longer path is nowhere: to look for a model's name in it would take the event loop milliseconds.
_LONGEST_PATTERN = 1024
# Endpoints parse a query on the event loop, in a time that grows with its bytes and, more so, its fields. Common
# proxies pass on no longer ones.
_LONGEST_QUERY = 8 << 10
_MOST_FIELDS = 32
ROUTE = "route"  # of a request's state: the path as the routes have it


@dataclass(frozen=True)
class Api:
    """`label` in metrics; `captions`: its requests are counted as in flight, and logged when they succeed too."""

    label: str
    shape: ErrorShape = PROBLEM
    captions: bool = False


class RouteGroup(NamedTuple):
    """Routes under one heading of the OpenAPI document, in the order in which they match. An endpoint takes the
    request and returns the response; what it raises is handled by who is around the application. The names of the
    routes are those of the operations in the document. `api` None: each route is an API of its own, as "/livez" is
    "livez"."""

    tag: str
    routes: Sequence[Route]
    api: Api | None = None


# Paths that do not exist have the errors of the API whose client would ask for them.
_NEIGHBOURS = (
    ("/v1/caption", Api("other")),
    ("/v1/", Api("other", OPENAI)),
    ("/v2/", Api("other", V2)),
    ("", Api("other")),
)


class Apis:
    """Maps method and path to the API, before the request is routed."""

    def __init__(self) -> None:
        self._fixed: dict[str, dict[str, Api]] = {}
        self._patterns: list[tuple[re.Pattern[str], frozenset[str], Api]] = []

    def add(self, group: RouteGroup) -> None:
        for route in group.routes:
            self._add(route, group.api or Api(route.path.strip("/") or "page"))

    def of(self, method: str, path: str) -> Api:
        """The API of a path, whatever is there; of several, the one that has the method."""
        methods = self._fixed.get(path)
        if methods is not None:
            return methods.get(method) or next(iter(methods.values()))
        for _, _, api in self._matching(path):
            return api
        return next(api for prefix, api in _NEIGHBOURS if path.startswith(prefix))

    def methods(self, path: str) -> list[str]:
        """The methods that a path answers, HEAD where there is GET; none where there is nothing."""
        found = set(self._fixed.get(path, ()))
        matching = [] if found else list(self._matching(path))
        # The first that matches is the one that is meant: others take its last words for the name of a model.
        found |= {each for pattern, methods, _ in matching if pattern == matching[0][0] for each in methods}
        return sorted(found)

    def _matching(self, path: str) -> Iterator[tuple[re.Pattern[str], frozenset[str], Api]]:
        if len(path) <= _LONGEST_PATTERN:
            yield from (each for each in self._patterns if each[0].match(path))

    def _add(self, route: Route, api: Api) -> None:
        if route.param_convertors:
            self._patterns.append((route.path_regex, frozenset(route.methods or ()), api))
            return
        methods: Mapping[str, Api] = dict.fromkeys(route.methods or (), api)
        self._fixed.setdefault(route.path, {}).update(methods)


class Dispatch:
    """ASGI application: each endpoint under its own path, without a step between.

    A framework's way to an endpoint costs the event loop as much as everything else that it does for a request, and
    the event loop is what limits the captions a second of a fast device."""

    def __init__(self, apis: Apis) -> None:
        self.complete = False  # until then, what it does not find may be there soon
        self._apis = apis
        self._fixed: dict[tuple[str, str], Route] = {}
        self._patterns: list[Route] = []
        # What is no request: the host's lifespan, and websockets, of which there are none.
        self._rest = Router()

    def add(self, group: RouteGroup) -> None:
        self._apis.add(group)
        for route in group.routes:
            if route.param_convertors:
                self._patterns.append(route)
            else:
                self._fixed |= {(method, route.path): route for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises NotReady, NotFound, MethodNotAllowed, QueryTooLong, and what the endpoint raises."""
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        _check_query(scope["query_string"])
        route = self._route(scope)
        scope["state"][ROUTE] = route.path  # for whoever names the request without its client's words
        response = await route.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

    def _route(self, scope: Scope) -> Route:
        path: str = scope["path"]
        route = self._fixed.get((scope["method"], path))
        if route is not None:
            return route
        for route in self._patterns if len(path) <= _LONGEST_PATTERN else ():
            match, child = route.matches(scope)
            if match is Match.FULL:
                scope.update(child)
                return route
        if not self.complete:
            raise NotReady("importing")
        methods = self._apis.methods(path)
        if methods:
            raise MethodNotAllowed(scope["method"], path, methods)
        raise nothing_at(path)


def nothing_at(path: str) -> NotFound:
    """The error of a path that has no endpoint."""
    return NotFound(f"There is nothing at {path[:200]}; GET /openapi.json lists what there is.")


def _check_query(query: bytes) -> None:
    """Raises QueryTooLong."""
    if len(query) > _LONGEST_QUERY or query.count(b"&") >= _MOST_FIELDS:
        raise QueryTooLong(_LONGEST_QUERY, _MOST_FIELDS)
