"""Answers GET / and GET /docs with the pages."""

from functools import cache
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from snapcap.service.api.operations.page_files import Page, load_page

_PAGE: dict[str, Any] = {
    "response_class": HTMLResponse,
    "responses": {304: {"description": "It is the one in If-None-Match"}},
}


def page_router(metrics: bool) -> APIRouter:
    """`metrics`: whether /metrics is on the same port."""
    router = APIRouter(tags=["documentation"])
    # Read when first asked for, and once: few processes are ever asked, and a start reads nothing for it.
    load = cache(load_page)

    @router.get(
        "/",
        summary="The page",
        response_description="A page to caption images on, and to watch the start",
        **_PAGE,
    )
    async def page(request: Request) -> Response:
        """One document that loads nothing else. It is there before the model is."""
        return _reply(request, load("index.html", metrics))

    @router.get("/docs", summary="The OpenAPI document as a page", response_description="The reference", **_PAGE)
    async def docs(request: Request) -> Response:
        """Reads /openapi.json, and nothing from anywhere else."""
        return _reply(request, load("docs.html", metrics))

    return router


def _reply(request: Request, page: Page) -> Response:
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if known & {page.etag, "*"}:
        return Response(status_code=304, headers=page.headers)
    return HTMLResponse(page.body, headers=page.headers)
