"""Answers GET / and GET /docs with the pages, and GET /openapi.json with what /docs shows."""

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
    """`groups`: what the document describes, as they are exposed."""
    # Read when first asked for, and once: few processes are ever asked, and a start reads nothing for it.
    load = cache(load_page)

    document: list[bytes] = []
    writing = asyncio.Lock()  # once, whoever asks meanwhile

    def write() -> bytes:
        # FastAPI and pydantic: 0.2 s of imports, which no other request needs.
        from snapcap.service.api.openapi.document import openapi_document  # noqa: PLC0415

        described = openapi_document(groups, apis, exposure)
        return json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()

    async def page(request: Request) -> Response:
        """One document that loads nothing else. It is there before the model is."""
        name = prefix_of(request.scope).rpartition("/")[2]
        if name and not request.scope.get("raw_path", b"/").endswith(b"/"):
            # The prefix without a slash at its end: links of the page lead to what is beside it.
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
