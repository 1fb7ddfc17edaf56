"""Finds the endpoint of a request, and the API that sets the shape of its errors."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from starlette.requests import Request
from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send

from snapcap.models.dataclass import dataclass
from snapcap.service.errors import MethodNotAllowed, NotFound, NotReady, QueryTooLong
from snapcap.service.http.problems import OPENAI, PROBLEM, SENTENCE, ErrorShape

# A longer path is not matched against patterns: the match would take milliseconds of the event loop.
_LONGEST_PATTERN = 1024
# Endpoints parse the query string on the event loop. The time grows with its bytes, and more with its fields.
# Common proxies do not forward a longer query string.
_LONGEST_QUERY = 8 << 10
_MOST_FIELDS = 32
ROUTE = "route"  # key in the request's state: the path pattern of the matched route


@dataclass(frozen=True)
class Api:
    """Describes an API. `label`: its name in metrics. `shape`: the shape of its errors. `captions`: its requests
    count as in flight, and the log has a line for each, not only for failures."""

    label: str
    shape: ErrorShape = PROBLEM
    captions: bool = False


class RouteGroup(NamedTuple):
    """Holds the routes under one heading of the OpenAPI document, in matching order.

    An endpoint takes the request and returns the response; the middleware handles its exceptions. The name of a
    route is the name of its operation in the document. `api` None: each route is an API of its own, labelled by its
    path, such as "livez" for "/livez"."""

    tag: str
    routes: Sequence[Route]
    api: Api | None = None


# A path without a route gets errors in the shape of the API with this prefix: its clients are likely to ask for it.
_NEIGHBOURS = (
    ("/v1/caption", Api("other")),
    ("/v1/", Api("other", OPENAI)),
    ("/v2/", Api("other", SENTENCE)),
    ("/api/", Api("other", SENTENCE)),
    ("", Api("other")),
)


class Apis:
    """Maps the method and path of a request to an API, before the request is routed."""

    def __init__(self) -> None:
        self._fixed: dict[str, dict[str, Api]] = {}
        self._patterns: list[tuple[re.Pattern[str], frozenset[str], Api]] = []

    def add(self, group: RouteGroup) -> None:
        for route in group.routes:
            api = group.api or Api(route.path.strip("/") or "page")
            if route.param_convertors:
                self._patterns.append((route.path_regex, frozenset(route.methods or ()), api))
            else:
                self._fixed.setdefault(route.path, {}).update(dict.fromkeys(route.methods or (), api))

    def of(self, method: str, path: str) -> Api:
        """Returns the API of a path: the one that accepts the method, if the path has several. A path without a
        route has an API too."""
        methods = self._fixed.get(path)
        if methods is not None:
            return methods.get(method) or next(iter(methods.values()))
        for _, _, api in self._matching(path):
            return api
        return next(api for prefix, api in _NEIGHBOURS if path.startswith(prefix))

    def methods(self, path: str) -> list[str]:
        """Returns the sorted methods that a path accepts, HEAD included with GET. Returns [] for a path without a
        route."""
        found = set(self._fixed.get(path, ()))
        matching = [] if found else list(self._matching(path))
        # Only the first matching pattern counts: a later one would take the end of the path for a part of the
        # model's name.
        found |= {each for pattern, methods, _ in matching if pattern == matching[0][0] for each in methods}
        return sorted(found)

    def _matching(self, path: str) -> Iterator[tuple[re.Pattern[str], frozenset[str], Api]]:
        if len(path) <= _LONGEST_PATTERN:
            yield from (each for each in self._patterns if each[0].match(path))


class Dispatch:
    """Calls the endpoint of each request directly. An ASGI application.

    The routing of a framework would take the event loop as much time as the rest of a request, and with a fast
    device the event loop limits the captions a second."""

    def __init__(self, apis: Apis) -> None:
        self.complete = False  # False: a path without a route may get one soon
        self._apis = apis
        self._fixed: dict[tuple[str, str], Route] = {}
        self._patterns: list[Route] = []
        # Handles scopes other than HTTP: the lifespan events of the host, and websockets, which it refuses.
        self._rest = Router()

    def add(self, group: RouteGroup) -> None:
        self._apis.add(group)
        for route in group.routes:
            if route.param_convertors:
                self._patterns.append(route)
            else:
                self._fixed |= {(method, route.path): route for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Raises NotReady, NotFound, MethodNotAllowed, QueryTooLong, and the endpoint's
        exceptions."""
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        query = scope["query_string"]
        if len(query) > _LONGEST_QUERY or query.count(b"&") >= _MOST_FIELDS:
            raise QueryTooLong(_LONGEST_QUERY, _MOST_FIELDS)
        route = self._route(scope)
        scope["state"][ROUTE] = route.path  # names the request in traces, without text of the client
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
        raise nothing_at(path, self._meant(path))

    def _meant(self, path: str) -> str:
        """Returns the path of an endpoint that differs in slashes or in a leading /v1, as addresses that clients
        join wrongly do; "" if there is none."""
        plain = f"/{'/'.join(filter(None, path[:_LONGEST_PATTERN].split('/')))}"
        others = (plain, f"/v1{plain}", plain.removeprefix("/v1"))
        return next((each for each in others if each != "/" and self._apis.methods(each)), "")


def nothing_at(path: str, meant: str = "") -> NotFound:
    """Returns the error for a path without an endpoint. `meant`: the path that the client probably means."""
    hint = f"did you mean {meant[:200]}? GET" if meant else "GET"
    return NotFound(f"There is nothing at {path[:200]}; {hint} /openapi.json lists what there is.")
