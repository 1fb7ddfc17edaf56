"""The APIs that are served side by side, and which of them a request belongs to."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.routing import Route, Router

from snapcap.service.error_shapes import OPENAI, PROBLEM, V2, ErrorShape


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
