"""Answers GET / and GET /docs with pages, and GET /openapi.json with the document that /docs shows."""

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from snapcap.service.api.middleware.prefix import HEADER, prefix_of
from snapcap.service.api.operations.page_files import Page, load_page
from snapcap.service.api.routing import Apis, RouteGroup

_OF_ONE_CLIENT = {"Cache-Control": "no-store", "Vary": HEADER}

if TYPE_CHECKING:
    from snapcap.service.api.app import Exposure


def page_routes(groups: Sequence[RouteGroup], apis: Apis, exposure: "Exposure") -> RouteGroup:
    """Returns the routes of the pages and of the OpenAPI document. `groups`: the routes in the document."""
    # Pages are read once, on the first request: few processes serve them, and the start must not wait for them.
    load = cache(load_page)

    document: list[bytes] = []
    writing = asyncio.Lock()  # concurrent requests wait for one document

    def write() -> bytes:
        # Imports FastAPI and pydantic, which takes 0.2 s, and which no other request needs.
        from snapcap.service.api.openapi.document import openapi_document  # noqa: PLC0415

        described = openapi_document(groups, apis, exposure)
        return json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()

    async def page(request: Request) -> Response:
        """One document that loads nothing else. It is there before the model is."""
        name = prefix_of(request.scope).rpartition("/")[2]
        if name and not request.scope.get("raw_path", b"/").endswith(b"/"):
            # Without a slash after the prefix, the relative links of the page would resolve outside of the prefix.
            return Response(status_code=307, headers={"Location": f"{name}/"})
        return _reply(request, load("index.html", exposure.metrics))

    async def docs(request: Request) -> Response:
        """Reads /openapi.json, and nothing from anywhere else."""
        return _reply(request, load("docs.html", exposure.metrics))

    async def openapi(request: Request) -> Response:
        """Written when it is first asked for."""
        async with writing:
            if not document:
                document.append(await asyncio.to_thread(write))
        prefix = prefix_of(request.scope)
        servers = b'{"servers":[{"url":"%b"}],' % prefix.encode() if prefix else b"{"
        return Response(servers + document[0][1:], headers=_OF_ONE_CLIENT, media_type="application/json")

    return RouteGroup("documentation", [Route("/", page), Route("/docs", docs), Route("/openapi.json", openapi)])


def _reply(request: Request, page: Page) -> Response:
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if known & {page.etag, "*"}:
        return Response(status_code=304, headers=page.headers)
    return HTMLResponse(page.body, headers=page.headers)
