"""Finds the endpoint of a request, and the API that sets the shape of its errors."""

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


class Dispatch:
    """Finds the API of each request before it is routed, and calls the endpoint directly. An ASGI application.

    The routing of a framework would take the event loop as much time as the rest of a request, and with a fast
    device the event loop limits the captions a second."""

    def __init__(self) -> None:
        self.complete = False  # all groups are added: before, a path without a route gets "not ready"
        self.groups: list[RouteGroup] = []
        self._fixed: dict[str, dict[str, tuple[Route, Api]]] = {}  # by path and method
        self._patterns: list[tuple[Route, Api]] = []
        # Handles scopes other than HTTP: the lifespan events of the host, and websockets, which it refuses.
        self._rest = Router()

    def add(self, *groups: RouteGroup) -> None:
        self.groups += groups
        for group in groups:
            for route in group.routes:
                found = route, group.api or Api(route.path.strip("/") or "page")
                if route.param_convertors:
                    self._patterns.append(found)
                else:
                    self._fixed.setdefault(route.path, {}).update(dict.fromkeys(route.methods or (), found))

    def api_of(self, method: str, path: str) -> Api:
        """Returns the API of a path: the one that accepts the method, if the path has several. A path without a
        route has an API too."""
        methods = self._fixed.get(path)
        if methods is not None:
            return (methods.get(method) or next(iter(methods.values())))[1]
        for _, api in self._matching(path):
            return api
        return next(api for prefix, api in _NEIGHBOURS if path.startswith(prefix))

    def methods(self, path: str) -> list[str]:
        """Returns the sorted methods that a path accepts, HEAD included with GET. Returns [] for a path without a
        route."""
        found = set(self._fixed.get(path, ()))
        matching = [] if found else [route for route, _ in self._matching(path)]
        # Only the first matching pattern counts: a later one would take the end of the path for a part of the
        # model's name.
        first = [route for route in matching if route.path_regex == matching[0].path_regex]
        return sorted(found.union(*(route.methods or () for route in first)))

    def _matching(self, path: str) -> Iterator[tuple[Route, Api]]:
        if len(path) <= _LONGEST_PATTERN:
            yield from (each for each in self._patterns if each[0].path_regex.match(path))

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
        fixed = self._fixed.get(path, {}).get(scope["method"])
        if fixed is not None:
            return fixed[0]
        for route, _ in self._matching(path):
            match, child = route.matches(scope)
            if match is Match.FULL:
                scope.update(child)
                return route
        if not self.complete:
            raise NotReady("importing")
        methods = self.methods(path)
        if methods:
            raise MethodNotAllowed(scope["method"], path, methods)
        raise nothing_at(path, self._meant(path))

    def _meant(self, path: str) -> str:
        """Returns the path of an endpoint that differs in slashes or in a leading /v1, as addresses that clients
        join wrongly do; "" if there is none."""
        plain = f"/{'/'.join(filter(None, path[:_LONGEST_PATTERN].split('/')))}"
        others = (plain, f"/v1{plain}", plain.removeprefix("/v1"))
        return next((each for each in others if each != "/" and self.methods(each)), "")


def nothing_at(path: str, meant: str = "") -> NotFound:
    """Returns the error for a path without an endpoint. `meant`: the path that the client probably means."""
    hint = f"did you mean {meant[:200]}? GET" if meant else "GET"
    return NotFound(f"There is nothing at {path[:200]}; {hint} /openapi.json lists what there is.")
