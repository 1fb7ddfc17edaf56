"""Lets pages of the origins that the operator named ask this server (CORS), and read what it answers.

It is around everything else: a browser shows a page no reply without these headers, so refusals have them too, and
it asks beforehand (a preflight) without a key. Imported only where an origin is allowed.
"""

import random
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from snapcap.service.api.middleware.request_id import HEADER
from snapcap.service.api.problems import PROBLEM
from snapcap.service.errors import BadRequest
from snapcap.service.telemetry.trace_context import TRACE_ID_HEADER

EVERY_ORIGIN = "*"
MAX_AGE_S = 3600  # for which a browser need not ask again; Chromium takes two hours at most
_METHODS = ("GET", "HEAD", "POST")
# Besides those that every page may read.
_READABLE = (
    HEADER,
    TRACE_ID_HEADER,
    "X-Snapcap-Ignored",
    "Retry-After",
    "Allow",
    "WWW-Authenticate",
    "Inference-Header-Content-Length",
)


class OriginRefused(BadRequest):
    """A page asks beforehand, and what it asks for is not allowed."""

    status = 403
    code = "origin_refused"
    title = "Origin refused"

    def __init__(self, origin: str, why: str) -> None:
        super().__init__(
            f"A page of {origin[:200]!r} may not ask this ({why}); the operator allows origins with --allow-origin."
        )


class CrossOrigin(CORSMiddleware):
    """ASGI middleware: Starlette's, whose preflights have an id, and say what is wrong as a problem.

    Keys are sent in a header that the page sets itself, so cookies and the like (credentials, to a browser) are
    never allowed. Any header may be sent: clients have many of their own."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        """`origins`: as `scheme://host:port`, or "*" for every one."""
        super().__init__(
            app,
            allow_origins=frozenset(origins),
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_READABLE,
            max_age=MAX_AGE_S,
            # A page of a public site may ask a server in a private network only where somebody named that site.
            allow_private_network=EVERY_ORIGIN not in origins,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        identity = f"{random.getrandbits(128):032x}"
        if response.status_code == 200:
            response = Response(status_code=204, headers=_kept(response))
            response.headers[HEADER] = identity
            return response
        why = bytes(response.body).decode("latin-1").removeprefix("Disallowed CORS ")
        refused = PROBLEM.response(OriginRefused(request_headers["origin"], why), "", identity)
        refused.headers.update({**_kept(response), HEADER: identity})
        return refused


def _kept(response: Response) -> dict[str, str]:
    """The headers that are about origins."""
    return {name: value for name, value in response.headers.items() if name.startswith(("access-control", "vary"))}
