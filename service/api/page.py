"""Answers GET / and GET /docs with pages, and GET /openapi.json with the document that /docs shows.

Each page is one document that loads nothing else. Styles and scripts become inline elements, and the
Content-Security-Policy contains their hashes. Images become data URIs. The source files also work when they are
opened without a server, as they link to the files beside them.
"""

import asyncio
import base64
import hashlib
import json
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from snapcap.service.config.settings import HttpSettings
from snapcap.service.http.middleware import PREFIX_HEADER, prefix_of
from snapcap.service.http.routing import Dispatch, RouteGroup

_OF_ONE_CLIENT = {"Cache-Control": "no-store", "Vary": PREFIX_HEADER}
_FOLDER = Path(__file__).parent / "static"
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w./]+)">')
_SCRIPT = re.compile(r'<script src="([\w./]+)"></script>')
_IMAGE = re.compile(r'(?<=(?:src|ref)=")([\w/-]+\.(?:svg|webp))(?=")')
_METRICS = re.compile(r"<a [^>]*data-metrics[^>]*>[^<]*</a>")
_IMAGE_TYPES = {".svg": "image/svg+xml", ".webp": "image/webp"}
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)


def page_routes(routes: Dispatch, http: HttpSettings, *, keys: bool) -> RouteGroup:
    """Returns the routes of the pages and of the OpenAPI document. `routes`: the routes in the document. `keys`:
    requests need an API key."""
    # Pages are read once, on the first request: few processes serve them, and the start must not wait for them.
    load, metrics = cache(load_page), http.metrics_port is None

    document: list[bytes] = []
    writing = asyncio.Lock()  # concurrent requests wait for one document

    def write() -> bytes:
        # Imports FastAPI and pydantic, which takes 0.2 s, and which no other request needs.
        from snapcap.service.api.openapi import openapi_document  # noqa: PLC0415

        described = openapi_document(routes, http, keys)
        return json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()

    async def page(request: Request) -> Response:
        """Returns one document that loads nothing else. The page is served before the model is loaded."""
        name = prefix_of(request.scope).rpartition("/")[2]
        if name and not request.scope.get("raw_path", b"/").endswith(b"/"):
            # Without a slash after the prefix, the relative links of the page would resolve outside of the prefix.
            return Response(status_code=307, headers={"Location": f"{name}/"})
        return _reply(request, *load("index.html", metrics))

    async def docs(request: Request) -> Response:
        """Returns a page that reads /openapi.json, and loads nothing from other servers."""
        return _reply(request, *load("docs.html", metrics))

    async def openapi(request: Request) -> Response:
        """Returns this document. The server writes it on the first request for it."""
        async with writing:
            if not document:
                document.append(await asyncio.to_thread(write))
        prefix = prefix_of(request.scope)
        servers = b'{"servers":[{"url":"%b"}],' % prefix.encode() if prefix else b"{"
        return Response(servers + document[0][1:], headers=_OF_ONE_CLIENT, media_type="application/json")

    return RouteGroup("documentation", [Route("/", page), Route("/docs", docs), Route("/openapi.json", openapi)])


def _reply(request: Request, body: bytes, headers: dict[str, str]) -> Response:
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if known & {headers["ETag"], "*"}:
        return Response(status_code=304, headers=headers)
    return HTMLResponse(body, headers=headers)


def load_page(name: str, metrics: bool) -> tuple[bytes, dict[str, str]]:
    """Returns a page of the package, such as "index.html", with the files that it includes, and its headers.

    ``metrics``: keep the link to /metrics. The link must go if /metrics has a port of its own."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inline(tag: str, file: str) -> str:
        # A browser normalizes line breaks before it hashes the text of an element.
        text = (_FOLDER / file).read_text("utf-8").replace("\r\n", "\n")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[tag].append(f"'sha256-{digest}'")
        return f"<{tag}>{text}</{tag}>"

    document = (_FOLDER / name).read_text("utf-8")
    if not metrics:
        document = _METRICS.sub("", document)
    document = _IMAGE.sub(lambda found: _data_uri(_FOLDER / found[1]), document)
    document = _STYLE.sub(lambda found: inline("style", found[1]), document)
    document = _SCRIPT.sub(lambda found: inline("script", found[1]), document)
    body = document.encode()
    policy = _POLICY.format(scripts=" ".join(hashes["script"]), styles=" ".join(hashes["style"]))
    headers = {
        "Content-Security-Policy": policy,
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        # The browser revalidates the page on each load, so that a new server version shows its own page.
        "Cache-Control": "no-cache",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return body, headers


def _data_uri(file: Path) -> str:
    return f"data:{_IMAGE_TYPES[file.suffix]};base64,{base64.b64encode(file.read_bytes()).decode()}"
