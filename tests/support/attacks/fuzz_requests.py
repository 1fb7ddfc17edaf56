"""Makes requests of bytes for the readers of bodies, and checks what comes of them."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any

from starlette.requests import Request

from snapcap.service.errors import BadRequest
from snapcap.service.http.problems import problem


class AtOnce(Executor):
    """Runs what it is given where it is asked to."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **named))
        except Exception as error:
            future.set_exception(error)
        return future


def request_of(body: bytes, content_type: str, query: bytes = b"", piece: int = 1 << 16) -> Request:
    """A request whose body arrives in pieces of so many bytes."""
    pieces = [body[at : at + piece] for at in range(0, len(body), piece)] or [b""]
    messages = iter(
        {"type": "http.request", "body": each, "more_body": number + 1 < len(pieces)}
        for number, each in enumerate(pieces)
    )

    async def receive() -> dict[str, Any]:
        return next(messages)

    fields = [(b"content-type", content_type.encode("latin-1"))]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": query, "headers": fields}
    return Request(scope, receive)


def read(what: Callable[[], Any] | Coroutine[Any, Any, Any]) -> Any:
    """Returns the value that was read, or None if it was refused. Asserts that the refusal is a client's error and
    can be written as a reply."""
    try:
        return asyncio.run(what) if isinstance(what, Coroutine) else what()
    except BadRequest as error:
        refusal = error
    assert 400 <= refusal.status < 500
    reply = json.dumps(problem(refusal, "/", "id")).encode()
    assert len(reply) < 20_000, "a reply that grows with the request"
    return None
